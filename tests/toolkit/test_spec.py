import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes import model_folder
from nxbucket.toolkit.errors import NxbucketError, Problem, SpecError
from nxbucket.toolkit.spec import DeploySpec, load_spec

Load = Callable[..., DeploySpec]
Problems = Callable[..., list[Problem]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes model.yaml beside a tiny Llama and loads it. Fields of config.json by keyword."""

    def write_and_load(text: str = "", **config: Any) -> DeploySpec:
        config = {"max_position_embeddings": 131072} | config
        model_folder(tmp_path / "llama", **config)
        file = tmp_path / "model.yaml"
        file.write_text(f"model: llama\n{text}")
        return load_spec(file)

    return write_and_load


@pytest.fixture
def problems(load: Load) -> Problems:
    def found(text: str, **config: Any) -> list[Problem]:
        with pytest.raises(SpecError) as caught:
            load(text, **config)
        return caught.value.problems

    return found


def lists(prefill: str = "", decode: str = "") -> str:
    text = "neuron_config:\n"
    text += f"  num_batched_tokens_buckets: {prefill}\n" if prefill else ""
    return text + (f"  num_seqs_buckets: {decode}\n" if decode else "")


def test_a_file_of_one_line_gets_the_documented_defaults(load: Load, tmp_path: Path) -> None:
    spec = load()
    assert spec.path == tmp_path / "model.yaml"
    assert spec.model_dir == tmp_path / "llama"
    assert (spec.target, spec.dtype, spec.tensor_parallel_size) == ("cpu", "float32", 1)
    assert (spec.max_model_len, spec.max_num_seqs, spec.max_num_batched_tokens) == (4096, 8, 2048)
    assert (spec.block_size, spec.max_blocks_per_seq, spec.num_kv_blocks) == (32, 128, 8 * 128 + 1)
    assert spec.neuron_config.num_batched_tokens_buckets == (128, 256, 512, 1024, 2048)
    assert spec.neuron_config.num_seqs_buckets == (1, 2, 4, 8)
    assert spec.enable_prefix_caching
    assert spec.async_scheduling is None
    assert spec.architecture.hidden_size == 64
    assert "max_model_len" in spec.defaulted
    assert "neuron_config.num_seqs_buckets" in spec.defaulted
    assert "model" not in spec.defaulted


def test_max_model_len_defaults_to_what_a_short_model_can_do(load: Load) -> None:
    spec = load(max_position_embeddings=512)
    assert spec.max_model_len == 512
    assert spec.effective_max_num_batched_tokens == 512
    assert spec.neuron_config.num_batched_tokens_buckets == (128, 256, 512)


def test_a_spec_is_frozen(load: Load) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().max_num_seqs = 9


def test_what_the_file_says_is_what_the_spec_holds(load: Load, tmp_path: Path) -> None:
    spec = load(
        "dtype: bfloat16\nnum_gpu_blocks_override: 200\nmax_model_len: 1024\n"
        "compiler: {optlevel: 1, flags: [], march: x86-64-v3}\n"
        "artifacts: {cache: ../cache}\nserve:\n  --served-model-name: [a, b]\n  port: 8001\n"
    )
    assert spec.dtype == "bfloat16"
    assert spec.num_kv_blocks == 200
    assert (spec.compiler.optlevel, spec.compiler.march) == (1, "x86-64-v3")
    assert spec.artifacts.cache == tmp_path / "../cache"
    assert spec.serve == {"served_model_name": ["a", "b"], "port": 8001}  # B114


def test_resolved_is_json_in_the_files_own_names_and_says_nothing_of_the_host(
    load: Load, tmp_path: Path
) -> None:
    resolved = load("artifacts: {cache: cache}\n").resolved()
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved["neuron_config"]["num_seqs_buckets"] == [1, 2, 4, 8]
    assert resolved["num_gpu_blocks_override"] == 1025
    assert str(tmp_path) not in json.dumps(resolved)


def test_resolved_is_itself_a_model_file(load: Load, tmp_path: Path) -> None:
    spec = load("max_num_seqs: 4\n")
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(spec.resolved()))
    assert load_spec(again).resolved() == spec.resolved()


def test_false_is_kept(load: Load) -> None:
    # B112
    spec = load("enable_prefix_caching: false\nasync_scheduling: false\n")
    assert spec.enable_prefix_caching is False
    assert spec.async_scheduling is False


@pytest.mark.parametrize(
    "text",
    [
        # B02: the token budget does not limit decode
        "max_model_len: 4096\nmax_num_batched_tokens: 512\nmax_num_seqs: 256\n"
        + lists("[128, 256, 512]", "[1, 8, 64, 128, 256]"),
        "max_num_batched_tokens: 317\n" + lists("[128, 256, 317]"),  # B04
        "max_num_batched_tokens: 2000\nblock_size: 32\n" + lists("[500, 1000, 2000]"),  # B06
        "max_model_len: 8192\nmax_num_batched_tokens: 1024\n" + lists("[1024]"),  # B19
        "max_num_seqs: 4\n" + lists(decode="\n  - 1\n  - 4"),  # B114
        "max_model_len: 128\nmax_num_batched_tokens: 128\n" + lists("[128]"),  # R01
        # R11: chunking off, every prompt in one step
        "max_model_len: 8192\nmax_num_batched_tokens: 8192\nenable_chunked_prefill: false\n",
        "max_model_len: 2048\nblock_size: 2048\n",  # B21, R27
        "max_model_len: 20\n",
        "neuron_config: {kv_segment_size_buckets: null}\ncompiler:\nserve:\nprofile: null\n",
        "pipeline_parallel_size: 1\nquantization: null\nkv_cache_dtype: auto\n",
    ],
)
def test_good_files_load(load: Load, text: str) -> None:
    load(text)


def test_a_budget_above_max_model_len_is_cut_and_said(load: Load) -> None:
    # B26, B17
    spec = load(
        "max_model_len: 1024\nmax_num_batched_tokens: 8192\nmax_num_seqs: 2\n"
        + lists("[128, 512, 1024]")
    )
    assert spec.effective_max_num_batched_tokens == 1024
    [note] = spec.notes
    assert "effective token budget is 1024" in note
    assert "AWS" in note


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        pytest.param("max_num_seqs: 64\n" + lists(decode="[]"), "bucket-empty", ["64"], id="B01"),
        pytest.param(
            "max_model_len: 8192\nmax_num_batched_tokens: 2048\n" + lists("[512, 2048, 4096]"),
            "bucket-last",
            ["4096", "max_num_batched_tokens 2048", "max_model_len 8192"],
            id="B03",
        ),
        pytest.param(
            "max_num_batched_tokens: 317\n" + lists("[128, 256, 512]"),
            "bucket-last",
            ["must be 317"],
            id="B04",
        ),
        pytest.param(
            "max_num_seqs: 12\n" + lists(decode="[1, 2, 4, 8]"),
            "bucket-last",
            ["ends in 8", "must be 12"],
            id="B08",
        ),
        pytest.param(
            lists("[2048, 1024, 512]"),
            "bucket-not-ascending",
            ["1024 at index 1 is below 2048 at index 0"],
            id="B10-prefill",
        ),
        pytest.param(
            lists(decode="[1, 4, 2, 8]"),
            "bucket-not-ascending",
            ["2 at index 2 is below 4 at index 1"],
            id="B10-decode",
        ),
        pytest.param(
            lists(decode='"1,8"'), "wrong-type", ["string 1,8, list of integers"], id="B11"
        ),
        pytest.param(
            "max_num_seqs: 32\n" + lists(decode="[1, 8, 8, 32]"),
            "bucket-not-ascending",
            ["8 at index 2 repeats 8 at index 1"],
            id="B11-duplicate",
        ),
        pytest.param(
            "max_model_len: 4096\nmax_num_batched_tokens: 8192\n" + lists("[512, 8192]"),
            "bucket-last",
            ["must be 4096", "min of"],
            id="B17",
        ),
        pytest.param(
            "max_model_len: 16384\n" + lists("[256, 16384]"),
            "bucket-last",
            ["max_num_batched_tokens 2048, its default"],
            id="B17-budget-left-out",
        ),
        pytest.param("max_model_len: 200\nblock_size: 48", "block-size", ["32"], id="B21-48"),
        pytest.param("block_size: 33", "block-size", ["multiple of 32"], id="B21-33"),
        pytest.param("block_size: 0", "out-of-range", ["at least 1"], id="B21-0"),
        pytest.param(
            "max_model_len: 2048\nblock_size: 4096", "block-size", ["above"], id="B21-4096"
        ),
        pytest.param(
            "max_num_batched_tokens: 512\nmax_model_len: 1024\nenable_chunked_prefill: false",
            "chunked-prefill",
            ["512", "1024"],
            id="B23",
        ),
        pytest.param(
            "enable_chunked_prefill: false\nmax_model_len: 32768",
            "chunked-prefill",
            ["max_num_batched_tokens 2048, its default"],
            id="B24",
        ),
        pytest.param("max_num_seqs: 4096", "budget-below-seqs", ["2048", "4096"], id="seqs"),
        pytest.param(
            "num_gpu_blocks_override: 128", "kv-too-small", ["128 blocks", "null block"], id="kv"
        ),
        pytest.param("max_model_len: 131073", "max-model-len", ["131073", "131072"], id="len"),
        pytest.param("max_num_seqs: 0o10", "wrong-type", ["string 0o10, integer"], id="B118"),
        pytest.param("max_num_seqs:", "empty-value", ["max_num_seqs"], id="null"),
        pytest.param("max_num_seqs: [8]", "wrong-type", ["a list, integer"], id="list"),
        pytest.param(
            "target: trn1\ncompiler: {lnc: 2}", "lnc", ["compiler.lnc"], id="lnc of another target"
        ),
        pytest.param(
            "target: trn2\ncompiler: {march: x86-64-v3}", "no-effect", ["march"], id="trn2 march"
        ),
        pytest.param("target: tnr1", "unknown-value", ["trn1"], id="target"),
        pytest.param("dtype: float31", "unknown-value", ["float32"], id="dtype"),
        pytest.param("dtype: 32", "wrong-type", ["integer 32, string"], id="dtype-int"),
        pytest.param("tensor_parallel_size: 2", "not-yet", ["tensor_parallel_size"], id="tp"),
        pytest.param("profile: llama", "profile-not-found", ["no profile llama"], id="profile"),
        pytest.param("artifacts: {remote: gs://b/p}", "remote", ["remote", "s3://"], id="remote"),
        pytest.param("compiler: {optlevel: 9}", "out-of-range", ["at most 3"], id="optlevel"),
        pytest.param("compiler: {optlevel: 2}", "no-effect", ["neuronx-cc"], id="optlevel on cpu"),
        pytest.param("compiler: {flags: [-x]}", "no-effect", ["neuronx-cc"], id="flags on cpu"),
        pytest.param("compiler: {lnc: 2}", "no-effect", ["neuronx-cc"], id="lnc on cpu"),
        pytest.param("compiler: {march: native}", "unknown-value", ["x86-64-v3"], id="march"),
        pytest.param("compiler: [a]", "wrong-type", ["a list, mapping"], id="section"),
        pytest.param("compiler: {flags: [1]}", "wrong-type", ["flags[0]"], id="flags"),
        pytest.param("serve: {a-b: 1, a_b: 2}", "duplicate-key", ["given twice"], id="serve-twice"),
        pytest.param("serve: {a: yes}", "ambiguous-value", ["yes"], id="serve-yes"),
        pytest.param("serve: {max-model-len: 8}", "serve-argument", ["max_model_len"], id="serve"),
        pytest.param('revision: "\\x01"', "bad-text", ["revision"], id="control"),
    ],
)
def test_each_rule_has_its_code_and_says_what_is_wrong(
    problems: Problems, text: str, code: str, says: list[str]
) -> None:
    [problem] = problems(text)
    assert problem.code == code
    for words in says:
        assert words in problem.message or words in problem.hint
    assert problem.hint
    assert problem.line is not None
    assert problem.line > 1


def test_a_list_that_keeps_only_awss_other_rule_is_told_so(problems: Problems) -> None:
    # B17
    [problem] = problems(
        "max_model_len: 4096\nmax_num_batched_tokens: 8192\n" + lists("[512, 8192]")
    )
    assert "min(max_num_batched_tokens, max_model_len)" in problem.hint
    assert "max_num_batched_tokens alone" in problem.hint


@pytest.mark.parametrize("item", ['"25 6"', "256.0", "true", "-128", "0", "null", '"0x100"'])
def test_each_bad_item_is_an_error_with_its_index(problems: Problems, item: str) -> None:
    # B12
    [problem] = problems("max_num_batched_tokens: 1024\n" + lists(f"[128, {item}, 512, 1024]"))
    assert problem.key == "neuron_config.num_batched_tokens_buckets[1]"
    assert (problem.line, problem.column) == (4, 37)
    assert item.strip('"') in problem.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1e3", "write 1000"),
        ("1.0e+3", "write 1000"),
        ("1_024", "write 1024"),
        ("1,024", "write 1024"),
        ("2K", "write 2048"),
        ("2048.0", "write 2048"),
        ("0x100", "write 256"),
        ("0o10", "write 8"),
        ('"2048"', "remove the quotes: 2048"),
        ("1:30", "write a plain decimal integer, e.g. 1024"),
        ("010", "write a plain decimal integer, e.g. 1024"),
        ("yes", "write a plain decimal integer, e.g. 1024"),
        ("9999999999999999999999", "write a plain decimal integer, e.g. 1024"),
    ],
)
def test_numbers_in_other_forms_are_refused_with_the_number_meant(
    problems: Problems, text: str, hint: str
) -> None:
    # B119: 1_024 is refused, as are all forms that two readers of YAML take differently
    [problem] = problems(f"max_num_batched_tokens: {text}\n")
    assert (problem.code, problem.hint) == ("wrong-type", hint)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("yes", "write true, without quotes"),
        ("off", "write false, without quotes"),
        ('"true"', "write true, without quotes"),
        ("1", "write true or false"),
    ],
)
def test_booleans_are_true_or_false(problems: Problems, text: str, hint: str) -> None:
    [problem] = problems(f"enable_prefix_caching: {text}\n")
    assert (problem.code, problem.hint) == ("wrong-type", hint)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("max_nm_seqs: 4", "did you mean max_num_seqs?"),
        ("enable-prefix-caching: false", "write enable_prefix_caching"),  # B113
        ("num_seqs_buckets: [1]", "num_seqs_buckets belongs under neuron_config"),
        ("num_seq_buckets: [1]", "did you mean neuron_config.num_seqs_buckets?"),
        ("neuron_config: {max_num_seqs: 4}", "max_num_seqs belongs at the top level"),
        ("neuron_config: {num_seqs_bucket: [8]}", "did you mean num_seqs_buckets?"),
        ("served_model_name: [a, b]", "served_model_name belongs under serve"),
        ("compiler: {optlvl: 2}", "did you mean optlevel?"),
        (
            "neuron_config: {context_encoding_buckets: [256]}",
            "use neuron_config.num_batched_tokens_buckets",
        ),  # B18
        (
            "neuron_config: {token_generation_buckets: [256]}",
            "context-length buckets are not batch buckets; use neuron_config.num_seqs_buckets, and "
            "decode_context_length_buckets for the lengths",
        ),  # B18
        ("batch_size: 4", "use max_num_seqs"),
        ("n_positions: 4", "use max_model_len"),
        ("tp_degree: 4", "use tensor_parallel_size"),
    ],
)
def test_an_unknown_key_is_answered_with_the_known_one(
    problems: Problems, text: str, hint: str
) -> None:
    [problem] = problems(text)
    assert (problem.code, problem.hint) == ("unknown-key", hint)
    assert (problem.line, problem.column) != (None, None)


def test_an_alias_is_a_copy(load: Load) -> None:
    # B122
    spec = load(
        "max_num_seqs: &n 4\nmax_num_batched_tokens: 2048\n"
        "neuron_config: {num_seqs_buckets: &b [1, 2, 4]}\nserve: {port: *n, x: *b, y: *b}\n"
    )
    assert spec.neuron_config.num_seqs_buckets == (1, 2, 4)
    assert spec.serve["x"] == [1, 2, 4]
    assert spec.serve["x"] is not spec.serve["y"]


def test_heads_that_do_not_split_are_named(problems: Problems) -> None:
    # B20
    found = problems(
        "tensor_parallel_size: 32\n",
        hidden_size=3584,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
    )
    assert [p.code for p in found] == ["not-yet", "heads-not-divisible"]
    assert "28 attention heads do not split over 32 ranks" in found[1].message


def test_everything_wrong_is_reported_in_one_run_in_file_order(problems: Problems) -> None:
    found = problems(
        "max_num_seqs: 0o10\nblock_size: 33\nbogus: 1\nenable_prefix_caching: on\n"
        "enable_prefix_caching: true\n" + lists("[4, 2, true]", "[]"),
        vocab_size="x",
    )
    assert [p.code for p in found] == [
        "wrong-type", "block-size", "unknown-key", "wrong-type", "duplicate-key",
        "bucket-not-ascending", "bucket-not-integer", "bucket-empty", "config-type",
    ]  # fmt: skip
    assert [p.file.name for p in found[-2:]] == ["model.yaml", "config.json"]


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("./nope", "model-not-found"),
        ("model.yaml", "model-not-found"),
        ("x" * 5000, "model-not-found"),
        ('"a\\0b"', "bad-text"),
        ("~", "model-missing"),
        ("123", "wrong-type"),
    ],
)
def test_the_model_must_be_a_folder_or_a_hub_id(tmp_path: Path, model: str, code: str) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(f"model: {model}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert [p.code for p in caught.value.problems] == [code]


def test_a_file_without_model_still_has_its_other_keys_checked(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("block_size: 33\n")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert {p.code for p in caught.value.problems} == {"model-missing", "block-size"}


def test_a_checkpoint_dtype_we_do_not_have_needs_one_in_the_file(load: Load) -> None:
    with pytest.raises(SpecError) as caught:
        load("", dtype="float64")
    assert [p.code for p in caught.value.problems] == ["dtype-unknown"]
    assert load("dtype: float32\n", dtype="float64").dtype == "float32"


GOOD = (
    "model: llama\nmax_model_len: 1024\nmax_num_batched_tokens: 512\nmax_num_seqs: 4\n"
    "neuron_config:\n  num_batched_tokens_buckets: [128, 512]\n  num_seqs_buckets: [1, 4]\n"
    "compiler: {optlevel: 1, flags: []}\nserve: {port: 8000, name: 'a'}\n"
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(GOOD)),
            st.integers(0, 6),
            st.binary(max_size=3) | st.sampled_from([b"[", b"{", b"&a ", b"*a", b"null", b"1e3"]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_good_file_with_any_edit_loads_or_is_a_known_error(
    tmp_path: Path, edits: list[tuple[int, int, bytes]]
) -> None:
    model_folder(tmp_path / "llama")
    content = GOOD.encode()
    for at, deleted, inserted in edits:
        content = content[:at] + inserted + content[at + deleted :]
    file = tmp_path / "model.yaml"
    file.write_bytes(content)
    try:
        json.dumps(load_spec(file).resolved())
    except NxbucketError as err:
        json.dumps(err.as_json())
