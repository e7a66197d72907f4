import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from null_compiler import NULL_TOOLCHAIN, a_program

from nxbucket.compile.key import key_inputs
from nxbucket.compile.manifest import Blob, BlobRole, Manifest
from nxbucket.compile.signature import ProgramSignature, TensorSpec
from nxbucket.toolkit.errors import CacheError

ROLES = get_args(BlobRole)
PROGRAM = a_program()
MANIFEST = Manifest(
    key_kind="input",
    program=PROGRAM.name,
    target="cpu-null",
    inputs=key_inputs(PROGRAM, NULL_TOOLCHAIN),
    graph_key="a" * 64,
    signature=PROGRAM.signature,
    blobs=(Blob("program", "b" * 64, 10),),
    toolchain={"compiler": "null"},
    lower_s=0.5,
    compile_s=1.25,
    peak_rss_bytes=1 << 20,
    log_sha256="c" * 64,
)

digests = st.text("0123456789abcdef", min_size=64, max_size=64)
sizes = st.integers(1, 1 << 40)
printable = st.characters(exclude_categories=("C", "Z"))
names = st.text(printable, min_size=1, max_size=20)
seconds = st.floats(0, 1e6)
tensors = st.builds(
    TensorSpec,
    name=names,
    role=st.sampled_from(["input", "kv_cache", "weight", "output"]),
    dtype=names,
    shape=st.lists(sizes, max_size=4).map(tuple),
    alias=st.none() | names,
)
signatures = st.builds(
    ProgramSignature,
    inputs=st.lists(tensors, max_size=3).map(tuple),
    outputs=st.lists(tensors, max_size=3).map(tuple),
)
plain = st.integers() | st.text() | seconds | st.none() | st.lists(st.integers())
manifests = st.builds(
    Manifest,
    key_kind=st.sampled_from(["input", "graph"]),
    program=names,
    target=names,
    inputs=st.dictionaries(names, plain, max_size=4),
    graph_key=digests,
    signature=signatures,
    blobs=st.lists(
        st.builds(Blob, role=st.sampled_from(ROLES), digest=digests, size_bytes=sizes),
        min_size=1,
        max_size=2,
        unique_by=lambda blob: blob.role,
    ).map(tuple),
    toolchain=st.dictionaries(names, names, max_size=3),
    lower_s=seconds,
    compile_s=seconds,
    peak_rss_bytes=sizes,
    log_sha256=digests,
)
garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=6,
)


@given(manifests)
def test_a_manifest_reads_back_exactly(manifest: Manifest) -> None:
    # B76
    back = Manifest.from_json(manifest.to_json())
    assert back == manifest
    assert back.key == manifest.key
    assert back.to_json() == manifest.to_json()


@given(signatures)
def test_a_signature_reads_back_exactly(signature: ProgramSignature) -> None:
    assert ProgramSignature.from_json(json.loads(json.dumps(signature.as_json()))) == signature


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    raw = json.loads(MANIFEST.to_json())
    change(raw)
    return json.dumps(raw).encode()


FIELDS = ["format", *(f.name for f in fields(Manifest))]


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_an_error_and_not_a_default(name: str) -> None:
    with pytest.raises(CacheError, match="entry"):
        Manifest.from_json(changed(lambda raw: raw.pop(name)))


def test_an_unknown_field_is_an_error_that_names_it() -> None:
    with pytest.raises(CacheError, match="colour"):
        Manifest.from_json(changed(lambda raw: raw.update(colour="red")))


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(
    "value", [None, True, -1, 0.5, "x", [], {}, [None], 10**400], ids=lambda value: repr(value)[:9]
)
def test_a_field_of_the_wrong_type_is_an_error_or_reads_back_exactly(name: str, value: Any) -> None:
    payload = changed(lambda raw: raw.update({name: value}))
    try:
        manifest = Manifest.from_json(payload)
    except CacheError:
        return
    good_as_they_are: dict[str, list[Any]] = {
        "program": ["x"],
        "target": ["x"],
        "inputs": [{}],
        "toolchain": [{}],
        "lower_s": [0.5],
        "compile_s": [0.5],
    }
    assert value in good_as_they_are[name]
    assert json.loads(manifest.to_json()) == json.loads(payload)


@pytest.mark.parametrize("name", ["lower_s", "compile_s", "inputs", "peak_rss_bytes"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_none_is_an_error(name: str, number: str) -> None:
    stand_in = '"here"'
    payload = changed(lambda raw: raw.update({name: {"x": "here"} if name == "inputs" else "here"}))
    with pytest.raises(CacheError):
        Manifest.from_json(payload.replace(stand_in.encode(), number.encode()))


@pytest.mark.parametrize("name", [f.name for f in fields(TensorSpec)])
def test_a_tensor_without_one_of_its_fields_is_an_error(name: str) -> None:
    with pytest.raises(CacheError, match="signature"):
        Manifest.from_json(changed(lambda raw: raw["signature"]["inputs"][0].pop(name)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", 1),
        ("role", "guest"),
        ("dtype", None),
        ("shape", 3),
        ("shape", [0]),
        ("shape", [True]),
        ("shape", [1.0]),
        ("alias", 1),
        ("layout", "column_major"),
    ],
)
def test_a_tensor_with_a_field_of_the_wrong_type_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(CacheError, match="signature"):
        Manifest.from_json(
            changed(lambda raw: raw["signature"]["outputs"][0].update({name: value}))
        )


@pytest.mark.parametrize(
    "blob",
    [
        {"role": "program", "digest": "b" * 64},
        {"role": "program", "digest": "b" * 63, "size_bytes": 1},
        {"role": "program", "digest": "../" + "b" * 61, "size_bytes": 1},
        {"role": "program", "digest": "b" * 64, "size_bytes": 0},
        {"role": "other", "digest": "b" * 64, "size_bytes": 1},
        {"role": "program", "digest": "b" * 64, "size_bytes": 1, "path": "/etc/passwd"},
        "b" * 64,
    ],
    ids=repr,
)
def test_a_malformed_blob_is_an_error(blob: Any) -> None:
    with pytest.raises(CacheError, match="blobs"):
        Manifest.from_json(changed(lambda raw: raw.update(blobs=[blob])))


def test_two_blobs_of_one_role_are_an_error() -> None:
    blob = {"role": "program", "digest": "b" * 64, "size_bytes": 1}
    with pytest.raises(CacheError, match="blobs"):
        Manifest.from_json(changed(lambda raw: raw.update(blobs=[blob, blob])))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_entry_raise_nothing_but_cache_error(payload: bytes) -> None:
    with pytest.raises(CacheError):
        Manifest.from_json(payload)


@given(garbage)
def test_json_that_is_no_entry_raises_nothing_but_cache_error(value: Any) -> None:
    with pytest.raises(CacheError):
        Manifest.from_json(json.dumps(value).encode())
    with pytest.raises(CacheError):
        ProgramSignature.from_json(value)


@given(st.sampled_from(FIELDS), garbage)
def test_an_entry_with_garbage_in_one_field_raises_nothing_but_cache_error(
    name: str, value: Any
) -> None:
    try:
        manifest = Manifest.from_json(changed(lambda raw: raw.update({name: value})))
    except CacheError:
        return
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert len(manifest.key) == 64
    f"{manifest.compile_s:.1f}"


@pytest.mark.parametrize("depth", [100, 1_000, 2_900, 100_000])
def test_deep_nesting_raises_nothing_but_cache_error(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    with pytest.raises(CacheError):
        Manifest.from_json(nested.encode())
    payload = changed(lambda raw: raw.update(inputs={"x": "here"})).replace(
        b'"here"', nested.encode()
    )
    try:
        assert len(Manifest.from_json(payload).key) == 64
    except CacheError:
        assert depth > 100


def test_the_signature_lists_the_weights_the_cache_and_the_logits() -> None:
    signature = a_program("decode", 4).signature
    shapes = {t.name: t.shape for t in (*signature.inputs, *signature.outputs)}
    assert shapes["input_ids"] == shapes["positions"] == shapes["slot_mapping"] == (4,)
    assert shapes["block_table"] == (4, 4)
    assert shapes["seq_lens"] == (4,)
    assert shapes["key.0"] == shapes["value.0"] == (9, 32, 2, 8)
    assert shapes["layers.0.qkv"] == (64, 32)
    assert shapes["logits"] == (4, 96)
    assert [t.alias for t in signature.outputs] == [None, "key.0", "value.0"]
    assert asdict(signature.outputs[0])["dtype"] == "float32"
    assert [t.name for t in signature.of_role("kv_cache")] == ["key.0", "value.0"]


def test_a_prefill_gives_the_logits_of_one_token() -> None:
    signature = a_program("prefill", 16).signature
    shapes = {t.name: t.shape for t in (*signature.inputs, *signature.outputs)}
    assert shapes["input_ids"] == (16,)
    assert shapes["block_table"] == (4,)
    assert shapes["context_len"] == shapes["num_tokens"] == (1,)
    assert shapes["logits"] == (1, 96)
