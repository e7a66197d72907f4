"""How many programs a model file asks for, and which: m + n x (c + 1)."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from null_compiler import model_file

from nxbucket.compile import compiler
from nxbucket.compile.plan import plan_programs
from nxbucket.toolkit import cli
from nxbucket.toolkit.spec import load_spec


def long_file(folder: Path, contexts: list[int], segment: int | None = None) -> Path:
    """Three prefill and two decode buckets, max_model_len 512 in blocks of 32."""
    file = model_file(folder)
    lines = "neuron_config:\n"
    lines += f"  decode_context_length_buckets: {contexts}\n" if contexts else ""
    lines += f"  kv_segment_size_buckets: [{segment}]\n" if segment else ""
    text = file.read_text().replace("neuron_config:\n", lines)
    file.write_text(text.replace("max_model_len: 128", "max_model_len: 512"))
    return file


def test_each_decode_bucket_has_a_program_for_each_context_and_max_model_len(
    tmp_path: Path,
) -> None:
    programs = plan_programs(load_spec(long_file(tmp_path, [128, 256], 64)))
    assert [(p.name, p.context_len, p.max_blocks) for p in programs] == [
        ("prefill_s32", None, 16),
        ("prefill_s64", None, 16),
        ("prefill_s128", None, 16),
        ("decode_b1_ctx128", 128, 4),
        ("decode_b1_ctx256", 256, 8),
        ("decode_b1", None, 16),
        ("decode_b2_ctx128", 128, 4),
        ("decode_b2_ctx256", 256, 8),
        ("decode_b2", None, 16),
    ]
    assert {(p.kv_segment_size, p.segment_blocks) for p in programs} == {(64, 2)}
    tables = {p.name: t.shape for p in programs for t in p.signature.inputs if "table" in t.name}
    assert tables["decode_b2_ctx128"] == (2, 4)
    assert tables["decode_b2"] == (2, 16)
    assert tables["prefill_s32"] == (16,)


@given(
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    contexts=st.lists(st.integers(1, 15).map(lambda n: 32 * n), unique=True).map(sorted),
)
def test_the_number_of_programs(
    tmp_path_factory: pytest.TempPathFactory, prefill: int, decode: int, contexts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    file = long_file(folder, contexts)
    sizes = [16 * n for n in range(1, prefill)] + [128]
    text = file.read_text().replace("[32, 64, 128]", str(sizes))
    seqs = list(range(1, decode + 1))
    text = text.replace("[1, 2]", str(seqs)).replace("max_num_seqs: 2", f"max_num_seqs: {decode}")
    file.write_text(text)
    programs = plan_programs(load_spec(file))
    assert len(programs) == prefill + decode * (len(contexts) + 1)
    assert len({p.name for p in programs}) == len({p.bucket for p in programs}) == len(programs)


@pytest.mark.parametrize(("contexts", "count"), [([], 3 + 2), ([128], 3 + 4), ([128, 256], 3 + 6)])
def test_a_dry_run_lists_them_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    contexts: list[int],
    count: int,
) -> None:
    file = long_file(tmp_path, contexts)
    monkeypatch.setitem(compiler.FACTORIES, "cpu", "null_compiler:NullCompiler")
    monkeypatch.setattr(sys, "argv", ["nxbucket", "compile", str(file), "--dry-run", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    programs = json.loads(capsys.readouterr().out)["programs"]
    assert len(programs) == count
    assert len({p["key"] for p in programs}) == count
