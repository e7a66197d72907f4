"""What goes into a compiled program and what comes out, in order.

The signature is the only description of an artifact that the runner, the lowering, the checks at
load and the lock file read. It is plain values: reading one imports no torch.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from nxbucket.toolkit.errors import CacheError

Role = Literal["input", "kv_cache", "weight", "output"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a program. `shape` is static; `alias` names the input an output overwrites."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    alias: str | None = None
    layout: Literal["row_major"] = "row_major"

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class ProgramSignature:
    """Inputs in calling order, then outputs.

    An output with an `alias` is the named input, updated in place; an executable returns the
    others only.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def of_role(self, role: Role) -> Iterator[TensorSpec]:
        return (t for t in (*self.inputs, *self.outputs) if t.role == role)

    def as_json(self) -> dict[str, Any]:
        return {
            "inputs": [{**asdict(t), "shape": list(t.shape)} for t in self.inputs],
            "outputs": [{**asdict(t), "shape": list(t.shape)} for t in self.outputs],
        }

    @classmethod
    def from_json(cls, raw: Any) -> "ProgramSignature":
        """Raises CacheError for anything `as_json` could not have written."""
        if not isinstance(raw, dict) or set(raw) != {"inputs", "outputs"}:
            raise CacheError("signature: an object with `inputs` and `outputs` is wanted")
        return cls(
            inputs=tuple(_tensor(t) for t in _listed(raw["inputs"])),
            outputs=tuple(_tensor(t) for t in _listed(raw["outputs"])),
        )


def _listed(raw: Any) -> list[Any]:
    if not isinstance(raw, list):
        raise CacheError("signature: a list of tensors is wanted")
    return raw


def _tensor(raw: Any) -> TensorSpec:
    wanted = {f.name for f in fields(TensorSpec)}
    if not isinstance(raw, dict) or set(raw) != wanted:
        raise CacheError(f"signature: a tensor has exactly the fields {', '.join(sorted(wanted))}")
    shape = raw["shape"]
    well_formed = (
        isinstance(raw["name"], str)
        and raw["role"] in get_args(Role)
        and isinstance(raw["dtype"], str)
        and isinstance(shape, list)
        and all(type(n) is int and n > 0 for n in shape)
        and (raw["alias"] is None or isinstance(raw["alias"], str))
        and raw["layout"] == "row_major"
    )
    if not well_formed:
        raise CacheError(f"signature: tensor {raw['name']!r} has a field of the wrong type")
    return TensorSpec(**{**raw, "shape": tuple(shape)})
