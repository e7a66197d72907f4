import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from fakes import model_folder
from nxbucket.toolkit import cli
from nxbucket.toolkit.errors import EnvironmentProblem


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a good model.yaml."""
    for name in [n for n in os.environ if n.startswith("NXBUCKET_")]:
        monkeypatch.delenv(name)
    model_folder(tmp_path / "llama")
    (tmp_path / "model.yaml").write_text("model: llama\nmax_num_batched_tokens: 8192\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nxbucket", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_validate_prints_each_value_and_where_it_comes_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "validate") == 0
    printed = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in printed.out.splitlines()}
    assert rows["max_num_batched_tokens"] == ["8192", "file"]
    assert rows["effective"][0] == "4096"
    assert rows["max_num_seqs"] == ["8", "default"]
    assert rows["dtype"] == ["float32", "checkpoint"]
    assert "effective token budget is 4096" in printed.err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("model.yaml --port 8000", "model.yaml -- --port 8000"),
        ("--port 8000", "-- --port 8000"),
        ("model.yaml --port=80 --emulate", "model.yaml --emulate -- --port=80"),
        ("model.yaml --port 80 -- --api-key a", "model.yaml -- --port 80 --api-key a"),
        ("m.yaml --port 80 --remote /x --locked", "m.yaml --locked --remote /x -- --port 80"),
        ("m.yaml --remote=s3://a/b --port 80", "m.yaml --remote=s3://a/b -- --port 80"),
    ],
)
def test_arguments_of_vllm_in_front_of_the_dashes_are_put_behind_them(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str,
    meant: str,
) -> None:
    assert run(monkeypatch, "serve", *given.split()) == 2
    err = capsys.readouterr().err
    assert "error: nxbucket serve has no option --port" in err
    assert f"hint: arguments of vllm serve go behind --: nxbucket serve {meant}\n" in err


def test_serve_takes_all_of_its_own_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--emulate", "--locked", "--remote", "s3://bucket/prefix")
    assert run(monkeypatch, "serve", "absent.yaml", *options) == 2
    assert "no such file" in capsys.readouterr().err
    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    ours = {name for p in serve.params for name in p.opts if name.startswith("--")}
    assert {*cli.SERVE_OPTIONS} == ours | {"--help"}


def test_a_slip_in_an_option_of_serve_is_named_by_what_it_is_near(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve", "--emulte") == 2
    assert "--emulate" in capsys.readouterr().err


def test_validate_shows_false_as_false(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # B112
    (folder / "model.yaml").write_text(
        "model: llama\nenable_prefix_caching: false\nasync_scheduling: false\n"
    )
    assert run(monkeypatch, "validate", "model.yaml") == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines() if "false" in line] == [
        ["enable_prefix_caching", "false", "file"],
        ["async_scheduling", "false", "file"],
    ]


def test_validate_json_is_one_object_on_stdout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "validate", "--json") == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["ok"] is True
    assert report["config"]["max_num_batched_tokens"] == 8192
    assert report["effective"]["max_num_batched_tokens"] == 4096
    assert "max_num_seqs" in report["defaulted"]
    assert printed.err == ""


def test_a_wrong_file_prints_every_problem_with_its_place_and_exits_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "bad[1].yaml"
    file.write_text("model: llama\nblock_size: 33\nneuron_config: {num_seqs_buckets: [8, [x]]}\n")
    assert run(monkeypatch, "validate", file.name) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0].startswith(f"{file}:2:13: block-size: block_size 33 is no multiple of 32")
    assert lines[1].startswith("  hint: nearest: 32 or 64")
    assert lines[2].startswith(
        f"{file}:3:39: bucket-not-integer: neuron_config.num_seqs_buckets[1]"
    )
    assert lines[-1] == f"error: {file}: 2 problems"


def test_a_wrong_file_under_json_is_one_object_and_the_same_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.yaml").write_text("model: llama\nmax_num_seqs: yes\n")
    assert run(monkeypatch, "validate", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    [problem] = report["problems"]
    assert (problem["code"], problem["line"], problem["column"]) == ("wrong-type", 2, 15)
    assert problem["key"] == "max_num_seqs"


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "nope.yaml"],
        ["validate", "."],
        ["validate", "--no-such-option"],
        ["validate", "model.yaml", "extra"],
        ["no-such-command"],
        ["--config", "model.yaml", "validate"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    # B123
    assert run(monkeypatch, *arguments) == 2
    assert capsys.readouterr().out == ""


def test_an_empty_file_is_an_error_and_not_defaults(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # B123
    (folder / "model.yaml").write_text("")
    assert run(monkeypatch, "validate") == 1
    assert "the file is empty" in capsys.readouterr().err


def test_without_a_model_file_here_the_error_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "validate") == 2
    error, empty, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: no model.yaml in {tmp_path}"
    assert empty == ""
    assert hint.startswith("hint: name the model file")


def test_a_known_error_shows_its_traceback_only_when_debugging(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "validate", "nope.yaml")
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("NXBUCKET_DEBUG", "1")
    run(monkeypatch, "validate", "nope.yaml")
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_error_is_a_bug_and_escapes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("nxbucket.toolkit.spec.load_spec", broken)
    monkeypatch.setattr(sys, "argv", ["nxbucket", "validate"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_each_known_error_has_its_own_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_permission(_: object) -> None:
        raise EnvironmentProblem("no permission", hint="look")

    monkeypatch.setattr("nxbucket.toolkit.spec.load_spec", no_permission)
    assert run(monkeypatch, "validate") == 3
    assert run(monkeypatch, "validate", "--json") == 3


def test_ctrl_c_exits_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nxbucket.toolkit.spec.load_spec", interrupted)
    assert run(monkeypatch, "validate") == 130


def test_an_unknown_variable_is_warned_about_with_the_nearest_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NXBUCKET_CACHE", "x")
    monkeypatch.setenv("NXBUCKET_DEBUG", "0")
    assert run(monkeypatch, "validate") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warnings == [
        "warning: unknown environment variable NXBUCKET_CACHE; did you mean NXBUCKET_CACHE_DIR?"
    ]


def test_version_and_the_exit_codes_are_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("nxbucket 0.")
    assert run(monkeypatch, "--help") == 0
    assert "  130  interrupted (Ctrl-C)\n" in capsys.readouterr().out


def child(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_validate_imports_nothing_heavy(folder: Path) -> None:
    heavy = "('torch', 'vllm', 'jax', 'transformers', 'numpy', 'rich', 'obstore', 'botocore')"
    code = (
        "import sys; from nxbucket.toolkit.cli import main; sys.argv = ['nxbucket', 'validate']\n"
        "try: main()\n"
        f"finally: print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    done = child(code, folder)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_reader_that_has_gone_is_no_traceback(folder: Path) -> None:
    code = "from nxbucket.toolkit.cli import main; main()"
    command = f"'{sys.executable}' -c '{code}' validate | true; exit ${{PIPESTATUS[0]}}"
    # The writer starts Python first, so `true` has long gone when it prints.
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == cli.EXIT_BROKEN_PIPE
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_ctrl_c_at_the_keyboard_exits_130_without_a_traceback(folder: Path) -> None:
    os.mkfifo(folder / "slow.yaml")
    code = "from nxbucket.toolkit.cli import main; print('up', flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "validate", "slow.yaml"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err


def commands(group: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        nested = hasattr(command, "commands")
        found += commands(command, (*prefix, name)) if nested else [(*prefix, name)]
    return found


def test_every_command_has_examples_of_itself_in_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands(typer.main.get_command(cli.app)):
        assert run(monkeypatch, *command, "--help") == 0
        out = capsys.readouterr().out
        examples = out.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
        assert examples, command
        assert all(f"nxbucket {' '.join(command)}" in line for line in examples), out


@pytest.mark.parametrize(
    ("words", "completed"), [("nxbucket doc", ["doctor"]), ("nxbucket cache v", ["verify"])]
)
def test_a_shell_completes_commands(folder: Path, words: str, completed: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from nxbucket.toolkit.cli import main; main()"],
        env={
            **os.environ,
            "_NXBUCKET_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        },
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == completed
