"""`compiler.flags`: what a model file may pass on to neuronx-cc, and where the rest belongs."""

import json
from pathlib import Path

import pytest
from null_compiler import model_file

from nxbucket.toolkit.compiler_flags import PINNED, check_flags, notes_on_flags
from nxbucket.toolkit.errors import Problem, SpecError
from nxbucket.toolkit.spec import load_spec


def hints(*flags: str) -> list[str]:
    return [problem.hint for problem in check_flags(flags)]


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--target", "set target instead"),
        ("--target=trn1", "set target instead"),
        ("--target trn1", "set target instead"),
        ("--targ=trn1", "set target instead"),
        ("--lnc", "set compiler.lnc instead"),
        ("-lnc", "set compiler.lnc instead"),
        ("-lnc2", "set compiler.lnc instead"),
        ("-lnc=2", "set compiler.lnc instead"),
        ("--logical-nc-config=1", "set compiler.lnc instead"),
        ("-O", "set compiler.optlevel instead"),
        ("-O1", "set compiler.optlevel instead"),
        ("-O 3", "set compiler.optlevel instead"),
        ("-O=3", "set compiler.optlevel instead"),
        ("--optlevel=2", "set compiler.optlevel instead"),
        ("--optlevel 2", "set compiler.optlevel instead"),
        ("--opt", "set compiler.optlevel instead"),
        ("--auto-cast=all", "set compiler.auto_cast instead"),
        ("--cache_dir=s3://bucket", "set artifacts.cache instead"),
    ],
)
def test_a_flag_that_repeats_a_key_names_the_key(flag: str, hint: str) -> None:
    assert hints("--enable-fast-context-switch", flag) == [hint]


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        ('"--model-type transformer"', '["--model-type=transformer"]'),
        ("--model-type=generic --enable-x", '["--model-type=generic", "--enable-x"]'),
        ("3", '["3"]'),
        ("{a: 1}", '["--model-type=transformer"]'),
    ],
)
def test_a_string_of_flags_is_answered_with_the_list(
    tmp_path: Path, flags: str, meant: str
) -> None:
    file = model_file(tmp_path, extra=f"target: trn2\ncompiler:\n  flags: {flags}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    (problem,) = caught.value.problems
    assert (problem.code, problem.hint) == ("wrong-type", f"write flags: {meant}")


@pytest.mark.parametrize("flag", PINNED)
def test_every_pinned_flag_is_refused_alone_and_with_a_value(flag: str) -> None:
    assert len(hints(flag)) == len(hints(f"{flag}=x")) == 1


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--model-type=generic",),
        ("--model-type", "transformer"),
        ("--auto-cast-type=bf16",),
        ("--auto-cast-type", "fp16"),
        ("--tensorizer-options=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=2",),
        ("--internal-hlo2tensorizer-options", "--fuse-dot-logistic=false"),
        ("--enable-saturate-infinity", "--enable-mixed-precision-accumulation"),
        ("--native-int64=enabled", "--implicit-integer-downcast=dot,pow"),
        ("--hbm-scratchpad-page-size=1024", "--jobs", "8"),
    ],
)
def test_other_flags_are_passed_on(flags: tuple[str, ...]) -> None:
    assert hints(*flags) == []


def test_a_word_that_is_no_option_and_two_words_in_one_are_refused() -> None:
    assert hints("other.hlo") == ["begin with the option, which starts with -"]
    assert hints("--model-type generic") == [
        'write "--model-type=generic", or two items of the list'
    ]


def test_a_flag_without_effect_on_the_target_is_noted() -> None:
    flags = ("--native-int64=enabled", "--enable-saturate-infinity")
    assert list(notes_on_flags(flags, "trn2")) == [
        "compiler.flags: --enable-saturate-infinity has an effect on trn1 only, and target is trn2"
    ]
    assert list(notes_on_flags(flags, "trn1")) == [
        "compiler.flags: --native-int64 needs trn2 or later, and target is trn1"
    ]


def problems(folder: Path, compiler: str) -> list[Problem]:
    file = model_file(folder, extra=f"target: trn2\ncompiler: {compiler}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    return caught.value.problems


def test_the_problem_stands_at_the_item_s_line(tmp_path: Path) -> None:
    flags = ["--enable-fast-context-switch", "-O3", "--lnc=1"]
    found = problems(tmp_path, json.dumps({"flags": flags}))
    lines = (tmp_path / "model.yaml").read_text().splitlines()
    assert [p.code for p in found] == ["compiler-flag"] * 2
    for problem, flag, key in zip(found, flags[1:], ("flags[1]", "flags[2]"), strict=True):
        assert problem.key == f"compiler.{key}"
        assert problem.line is not None
        assert problem.column is not None
        assert lines[problem.line - 1][problem.column - 1 :].startswith(f'"{flag}"')
        assert flag in problem.message


def test_good_flags_reach_the_spec_in_order_and_notes_are_kept(tmp_path: Path) -> None:
    flags = '["--enable-saturate-infinity", "--model-type=generic"]'
    file = model_file(tmp_path, extra=f"target: trn2\ncompiler: {{flags: {flags}}}\n")
    spec = load_spec(file)
    assert spec.compiler.flags == ("--enable-saturate-infinity", "--model-type=generic")
    assert any("has an effect on trn1 only" in note for note in spec.notes)
