"""A program's tensors as XLA writes their types: float32 of [1, 13] is f32[1,13]."""

from collections.abc import Iterator, Sequence

from nxbucket.compile.signature import TensorSpec

HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32"}


def hlo_type(spec: TensorSpec) -> str:
    return f"{HLO_DTYPES[spec.dtype]}[{','.join(map(str, spec.shape))}]"


def tensor_faults(what: str, found: Sequence[str], wanted: Sequence[TensorSpec]) -> Iterator[str]:
    """Where a module's parameters or outputs, by their types, are not those of a signature."""
    if len(found) != len(wanted):
        yield f"it has {len(found)} {what}s, not {len(wanted)}"
        return
    for i, (there, spec) in enumerate(zip(found, wanted, strict=True)):
        if there != hlo_type(spec):
            yield f"{what} {i} ({spec.name}) is {there}, not {spec.dtype} {list(spec.shape)}"
