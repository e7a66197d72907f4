"""An entry of the artifact cache: what was compiled, from what, into which bytes."""

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from nxbucket.compile.canonical import digest_of
from nxbucket.compile.signature import ProgramSignature
from nxbucket.toolkit.errors import CacheError

FORMAT = 1
MAX_ENTRY_BYTES = 4 << 20
"""What claims to be an entry and is larger is not read."""
HEX64 = re.compile(r"[0-9a-f]{64}")


BlobRole = Literal["program", "hlo"]
"""`program`: what a device or a processor runs (.pt2, NEFF). `hlo`: the graph it was made from, an
XLA HloModuleProto; it is what `--emulate` runs, and a device's loader reads shapes from it."""


@dataclass(frozen=True)
class Blob:
    """Bytes in the cache: `blobs/sha256/<2>/<digest>`. `role` says what a loader does with them."""

    role: BlobRole
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """The JSON behind `entries/<2>/<key>.json`.

    `inputs` are the key's inputs in full: their digest is the key, so an entry that was moved
    under another name is found out. `key_kind` is the level of the key (docs/cache-keys.md).
    """

    key_kind: Literal["input", "graph"]
    program: str
    target: str
    inputs: dict[str, Any]
    graph_key: str
    signature: ProgramSignature
    blobs: tuple[Blob, ...]
    toolchain: dict[str, str]
    lower_s: float
    compile_s: float
    peak_rss_bytes: int
    log_sha256: str

    @property
    def key(self) -> str:
        return digest_of(self.inputs)

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.blobs)

    def to_json(self) -> bytes:
        raw = {
            "format": FORMAT,
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "signature": self.signature.as_json(),
            "blobs": [asdict(b) for b in self.blobs],
        }
        return json.dumps(raw, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, payload: bytes) -> "Manifest":
        """Raises CacheError, with the reason, for anything `to_json` could not have written."""
        try:
            raw = json.loads(payload)
        except (ValueError, RecursionError) as err:
            raise CacheError(f"entry is not JSON: {err}") from err
        if not isinstance(raw, dict):
            raise CacheError("entry is not a JSON object")
        if type(raw.get("format")) is not int or raw["format"] != FORMAT:
            raise CacheError(
                f"entry has format {raw.get('format')!r}; this nxbucket reads {FORMAT}"
            )
        del raw["format"]
        wanted = {f.name for f in fields(cls)}
        if set(raw) != wanted:
            odd = ", ".join(sorted(set(raw) ^ wanted))
            raise CacheError(f"entry has missing or unknown fields: {odd}")
        for name in ("program", "target"):
            # Printable, as `cache ls` puts them on a terminal.
            _check(isinstance(raw[name], str) and raw[name].isprintable(), name)
        _check(raw["key_kind"] in ("input", "graph"), "key_kind")
        _check(isinstance(raw["inputs"], dict) and _is_hashable(raw["inputs"]), "inputs")
        _check(is_digest(raw["graph_key"]), "graph_key")
        _check(is_digest(raw["log_sha256"]), "log_sha256")
        toolchain = raw["toolchain"]
        _check(isinstance(toolchain, dict), "toolchain")
        _check(all(isinstance(v, str) for v in toolchain.values()), "toolchain")
        for name in ("lower_s", "compile_s"):
            # The upper limit also keeps out infinity, and integers no float can hold.
            _check(type(raw[name]) in (int, float) and 0 <= raw[name] < 1e12, name)
        rss = raw["peak_rss_bytes"]
        _check(type(rss) is int and 0 <= rss < 1 << 63, "peak_rss_bytes")
        return cls(
            **{
                **raw,
                "signature": ProgramSignature.from_json(raw["signature"]),
                "blobs": blobs_from_json(raw["blobs"]),
            }
        )


def blob_of(blobs: tuple[Blob, ...], role: BlobRole) -> Blob | None:
    return next((blob for blob in blobs if blob.role == role), None)


def blobs_from_json(raw: Any) -> tuple[Blob, ...]:
    """Raises CacheError for anything but a list of Blobs, at most one of each role."""
    _check(isinstance(raw, list) and len(raw) > 0, "blobs")
    blobs = tuple(blob_from_json(b) for b in raw)
    _check(len({blob.role for blob in blobs}) == len(blobs), "blobs")
    return blobs


def blob_from_json(raw: Any) -> Blob:
    """Raises CacheError for anything but an object with exactly a Blob's fields."""
    well_formed = (
        isinstance(raw, dict)
        and set(raw) == {"role", "digest", "size_bytes"}
        and raw["role"] in get_args(BlobRole)
        and is_digest(raw["digest"])
        and type(raw["size_bytes"]) is int
        and raw["size_bytes"] > 0
    )
    _check(well_formed, "blobs")
    return Blob(**raw)


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and HEX64.fullmatch(value) is not None


def _is_hashable(inputs: dict[str, Any]) -> bool:
    """Whether there is a key of these. Python's JSON reads NaN and infinity; a key has neither."""
    try:
        digest_of(inputs)
    except (ValueError, RecursionError):
        return False
    return True


def _check(good: bool, field: str) -> None:
    if not good:
        raise CacheError(f"entry: field `{field}` is malformed")
