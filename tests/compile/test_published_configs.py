"""Models people serve: planned from config.json alone, keyed the same everywhere, compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from null_compiler import NULL_TOOLCHAIN, null_spec
from published_configs import PUBLISHED, Published

from nxbucket.compile.build import plan
from nxbucket.compile.cache import ArtifactCache, Hit
from nxbucket.compile.cost import cost_of
from nxbucket.compile.key import input_key
from nxbucket.compile.plan import plan_programs
from nxbucket.toolkit.errors import SpecError
from nxbucket.toolkit.spec import load_spec

NULL_CLI = Path(__file__).parents[1] / "null_cli.py"
MODEL_FILE = """\
model: ./model
max_model_len: 2048
max_num_seqs: 2
max_num_batched_tokens: 512
neuron_config: {num_batched_tokens_buckets: [128, 512], num_seqs_buckets: [1, 2]}
artifacts: {cache: cache}
"""
NAMES = ["prefill_s128", "prefill_s512", "decode_b1", "decode_b2"]

supported = pytest.mark.parametrize(
    "published", [p for p in PUBLISHED if p.refused is None], ids=lambda p: p.name
)
refused = [p for p in PUBLISHED if p.refused is not None]


def model_file(published: Published, folder: Path) -> Path:
    published.copy_to(folder / "model")
    (folder / "model.yaml").write_text(MODEL_FILE)
    return folder / "model.yaml"


@supported
def test_the_weights_have_the_published_size(published: Published, tmp_path: Path) -> None:
    spec = load_spec(model_file(published, tmp_path))
    for program in plan_programs(spec):
        assert cost_of(program).weight_bytes == pytest.approx(2 * published.parameters, rel=0.001)


@supported
def test_flops_are_near_two_for_each_parameter_and_token(
    published: Published, tmp_path: Path
) -> None:
    # The rule of thumb leaves out attention, and counts an embedding that is not tied.
    spec = load_spec(model_file(published, tmp_path))
    arch = spec.architecture
    attention = 4 * arch.num_attention_heads * arch.head_dim * 2048 * arch.num_hidden_layers
    decode = next(p for p in plan_programs(spec) if p.name == "decode_b1")
    embedding = 0 if arch.tie_word_embeddings else arch.vocab_size * arch.hidden_size
    expected = 2 * (published.parameters - embedding) + attention
    assert cost_of(decode).flops == pytest.approx(expected, rel=0.01)


@pytest.mark.skipif(not refused, reason="every published model is supported")
@pytest.mark.parametrize("published", refused, ids=lambda p: p.name)
def test_what_is_not_supported_is_refused_by_name(published: Published, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(model_file(published, tmp_path))
    assert any(str(published.refused) in problem.message for problem in caught.value.problems)


PLAN = """
import runpy, socket, sys
cli, host, file = sys.argv[1:]
socket.gethostname = lambda: host
sys.argv = [cli, "plan", file, "--json"]
runpy.run_path(cli, run_name="__main__")
"""


def planned_keys(file: Path, home: Path, cwd: Path, seed: str, host: str, user: str) -> list[str]:
    """The keys of `nxbucket plan`, run by somebody else somewhere else."""
    home.mkdir(exist_ok=True)
    variables = {"HOME": str(home), "USER": user, "LOGNAME": user, "HOSTNAME": host}
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(NULL_CLI), host, str(file)],
        env={
            **os.environ,
            **variables,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(NULL_CLI.parent)]),
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    programs = json.loads(done.stdout)["programs"]
    assert [p["name"] for p in programs] == NAMES
    return [p["key"] for p in programs]


@supported
def test_two_hosts_folders_users_and_hash_seeds_have_one_set_of_keys(
    published: Published, tmp_path: Path
) -> None:
    one = model_file(published, tmp_path / "one")
    other = model_file(published, tmp_path / "another folder" / "deeper")
    keys = planned_keys(one, tmp_path / "home-a", Path("/"), "0", "host-a", "ann")
    assert keys == planned_keys(
        other, tmp_path / "home-b", other.parent, "4711", "host-b.example", "bob"
    )
    here = [input_key(p, NULL_TOOLCHAIN) for p in plan_programs(load_spec(one))]
    assert keys == here
    assert len(set(keys)) == len(NAMES)


def test_no_two_models_share_a_key(tmp_path: Path) -> None:
    keys = [
        input_key(program, NULL_TOOLCHAIN)
        for published in PUBLISHED
        if published.refused is None
        for program in plan_programs(load_spec(model_file(published, tmp_path / published.name)))
    ]
    assert len(set(keys)) == len(keys)


@supported
def test_it_compiles_and_the_next_plan_is_all_hits(published: Published, tmp_path: Path) -> None:
    spec = load_spec(model_file(published, tmp_path))
    done = subprocess.run(
        [sys.executable, str(NULL_CLI), "compile", str(spec.path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [p["status"] for p in json.loads(done.stdout)["programs"]] == ["compiled"] * len(NAMES)
    again = plan(spec, ArtifactCache(tmp_path / "cache"), null_spec())
    assert all(isinstance(p.found, Hit) for p in again.programs)
