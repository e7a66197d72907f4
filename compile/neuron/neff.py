"""The compiled file of a Neuron target: its header, what its archive says, and whether it fits.

A NEFF is a header of 1024 bytes and a tar archive, gzipped or not. The layout is AWS's
(neuron-runtime/explore/work-with-neff-files.rst); which digest goes with which pkg_version, and the
names of the targets, are not documented and come from reading public files. No NEFF that a real
neuronx-cc wrote has been read yet: docs/hardware.md says how to try one.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from nxbucket.compile.neuron.neff_archive import MalformedNeff, Member, is_gzip, read_members
from nxbucket.compile.program import ITEM_BYTES
from nxbucket.compile.signature import ProgramSignature, TensorSpec

HEADER_BYTES = 1024
HEADER = struct.Struct("<5Q128sI32s16s256sI64sQI468x")
assert HEADER.size == HEADER_BYTES
NEWEST_MAJOR = 2
INCOMPATIBLE_FEATURES = 0x7FFFFFFFF8000000
"""Features that today's runtime does not know; it says "compiled by a newer version"."""
KELF_TARGETS = {
    "sunda": ("trn1", "trn1n", "inf2"),
    "v2": ("trn1", "trn1n", "inf2"),
    "": ("trn1", "trn1n", "inf2"),
    "cayman": ("trn2",),
    "v3": ("trn2",),
    "mariana": ("trn3",),
    "v4": ("trn3",),
}
"""What a NEFF calls a chip, and our targets with that chip. `*` is any; nothing is the oldest."""
ANY_TARGET = "*"
MAX_SIZE_BYTES = 1 << 62
MAX_GRAPHS = 16
DigestState = Literal["ok", "differs", "not checked"]


@dataclass(frozen=True)
class NeffHeader:
    pkg_version: int
    header_size: int
    data_size: int
    major: int
    minor: int
    build_version: str
    num_tpb: int
    hash: str
    uuid: str
    name: str
    requested_tpb_count: int
    feature_bits: int
    lnc_size: int


@dataclass(frozen=True)
class NeffTensor:
    """A buffer that def.json of a graph names an input or an output."""

    graph: str
    name: str
    kind: Literal["input", "output"]
    size_bytes: int


@dataclass(frozen=True)
class Neff:
    """`notes`: what is odd and no fault. `target` is None where the archive does not say."""

    header: NeffHeader
    size_bytes: int
    compressed: bool
    digest: DigestState
    digest_scheme: Literal["md5", "sha256"] | None
    members: tuple[tuple[str, int], ...]
    target: str | None
    graphs: tuple[str, ...]
    tensors: tuple[NeffTensor, ...]
    notes: tuple[str, ...]

    @property
    def lnc(self) -> int | None:
        """None where the header does not record it."""
        return self.header.lnc_size or None

    def as_json(self) -> dict[str, Any]:
        raw = asdict(self)
        raw["members"] = [{"name": name, "size_bytes": size} for name, size in self.members]
        raw["targets"] = list(targets_of(self.target))
        raw["lnc"] = self.lnc
        return raw


def looks_like_neff(start: bytes) -> bool:
    """There is no magic number: the first fields must be plausible. Takes the first 40 bytes."""
    if len(start) < 40:
        return False
    pkg_version, header_size, _, major, _ = struct.unpack_from("<5Q", start)
    return bool(header_size == HEADER_BYTES and 1 <= pkg_version <= 16 and major <= 16)


def targets_of(kelf_target: str | None) -> tuple[str, ...]:
    """Our targets that a NEFF's own word for its chip stands for; none for `*` and the unknown."""
    return KELF_TARGETS.get(kelf_target, ()) if kelf_target is not None else ()


def read_neff(path: Path) -> Neff:
    """Raises MalformedNeff for a file that is no whole NEFF. A digest may differ all the same."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        header = read_header(file, size)
        notes = _oddities(header, size)
        digest, scheme = _check_digest(file, header)
        if digest == "not checked":
            notes.append(f"digest not checked: pkg_version {header.pkg_version} is unknown here")
        file.seek(header.header_size)
        compressed = is_gzip(file.read(2))
        if digest == "differs":
            # What such an archive says is no use to anybody.
            return Neff(header, size, compressed, digest, scheme, (), None, (), (), tuple(notes))
        file.seek(header.header_size)
        archive = _Archive(read_members(file, header.data_size, _is_read))
    return Neff(
        header,
        size,
        compressed,
        digest,
        scheme,
        tuple(archive.members),
        archive.target,
        tuple(archive.graphs),
        tuple(archive.tensors),
        tuple(notes),
    )


def read_header(file: BinaryIO, size: int) -> NeffHeader:
    raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise MalformedNeff(f"has {size} bytes, fewer than a NEFF's header")
    (pkg, header_size, data_size, major, minor, build, tpb, digest, uuid, name, requested, _nodes,
     features, lnc) = HEADER.unpack(raw)  # fmt: skip
    if header_size != HEADER_BYTES:
        raise MalformedNeff(f"is no NEFF: its header says it has {header_size} bytes, not 1024")
    if data_size > size - HEADER_BYTES:
        raise MalformedNeff(
            f"is cut off: its header promises {data_size} bytes of archive, "
            f"{size - HEADER_BYTES} are there"
        )
    if data_size == 0:
        raise MalformedNeff("has a header and no archive")
    if major > NEWEST_MAJOR:
        raise MalformedNeff(f"has NEFF version {major}.{minor}; {NEWEST_MAJOR} is the newest known")
    return NeffHeader(
        pkg, header_size, data_size, major, minor, _text(build), tpb, digest.hex(), uuid.hex(),
        _text(name), requested, features, lnc,
    )  # fmt: skip


def _text(field: bytes) -> str:
    text = field.partition(b"\0")[0].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def _oddities(header: NeffHeader, size: int) -> list[str]:
    notes = []
    if (extra := size - header.header_size - header.data_size) > 0:
        notes.append(f"{extra} bytes follow the archive")
    if header.feature_bits & INCOMPATIBLE_FEATURES:
        notes.append(f"feature bits {header.feature_bits:#x}: a runtime of today may refuse them")
    return notes


def _check_digest(
    file: BinaryIO, header: NeffHeader
) -> tuple[DigestState, Literal["md5", "sha256"] | None]:
    """Over the archive's bytes as they are in the file, compressed or not."""
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    file.seek(header.header_size)
    left = header.data_size
    while left and (chunk := file.read(min(left, 1 << 20))):
        md5.update(chunk)
        sha256.update(chunk)
        left -= len(chunk)
    # An MD5 fills the first half of the field; the rest was seen to hold other things.
    if header.hash[:32] == md5.hexdigest():
        return "ok", "md5"
    if header.hash == sha256.hexdigest():
        return "ok", "sha256"
    if header.pkg_version == 2:
        return "differs", "md5"
    return ("differs", "sha256") if header.pkg_version == 1 else ("not checked", None)


def _is_read(name: str) -> bool:
    folder, _, file_name = name.rpartition("/")
    if folder:
        return file_name == "def.json" and "/" not in folder
    return file_name.startswith("kelf") and file_name.endswith(".json")


class _Archive:
    """What the JSON files say. Raises MalformedNeff where they contradict the format."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members: list[tuple[str, int]] = []
        self.target: str | None = None
        self.graphs: list[str] = []
        self.tensors: list[NeffTensor] = []
        kelf_name: str | None = None
        for member in members:
            self.members.append((member.name, member.size_bytes))
            folder = member.name.rpartition("/")[0]
            if not _is_read(member.name):
                continue
            if not folder:
                if kelf_name is not None:
                    raise MalformedNeff(f"its archive holds {kelf_name} and {member.name}")
                kelf_name = member.name
                self.target = self._read_kelf(member)
            else:
                if len(self.graphs) == MAX_GRAPHS:
                    raise MalformedNeff(f"its archive has more than {MAX_GRAPHS} graphs")
                self.graphs.append(folder)
                self.tensors += _tensors(folder, _json_object(member))
        if kelf_name is None:
            raise MalformedNeff("its archive has no kelf-*.json")
        self.graphs.sort()

    @staticmethod
    def _read_kelf(member: Member) -> str:
        target = _json_object(member).get("target", "")
        if not isinstance(target, str) or not target.isprintable() or len(target) > 100:
            raise MalformedNeff(f"{member.name}: `target` is no name")
        return target


def _json_object(member: Member) -> dict[str, Any]:
    try:
        raw = json.loads(member.payload or b"")
    except (ValueError, RecursionError):
        raise MalformedNeff(f"{member.name} in its archive is no JSON") from None
    if not isinstance(raw, dict):
        raise MalformedNeff(f"{member.name} in its archive is no JSON object")
    return raw


def _tensors(graph: str, definition: dict[str, Any]) -> list[NeffTensor]:
    variables = definition.get("var", {})
    if not isinstance(variables, dict):
        raise MalformedNeff(f"{graph}/def.json: `var` is no object")
    tensors = []
    for name, variable in variables.items():
        kind = variable.get("type") if isinstance(variable, dict) else None
        if kind not in ("input", "output"):
            continue
        size = variable.get("size")
        shown = _text(name.encode(errors="replace"))
        if type(size) is not int or not 0 <= size < MAX_SIZE_BYTES:
            raise MalformedNeff(f"{graph}/def.json: {shown!r} has no size in bytes")
        tensors.append(NeffTensor(graph, shown, kind, size))
    return tensors


def check_neff_file(path: Path, target: str, lnc: int, signature: ProgramSignature) -> list[str]:
    """What keeps this file from being the program of that target; empty if nothing does.

    Each is a sentence's end, to follow the file's or the program's name.
    """
    try:
        neff = read_neff(path)
    except MalformedNeff as err:
        return [str(err)]
    except OSError as err:
        return [f"cannot be read: {err.strerror or err}"]
    return check_neff(neff, target=target, lnc=lnc, signature=signature)


def check_neff(neff: Neff, *, target: str, lnc: int, signature: ProgramSignature) -> list[str]:
    """Digest, chip, logical core, and the bytes of all inputs and outputs.

    Sizes are compared as a bag, since names are the compiler's: an input of every size that the
    signature has, as often, and no other; the outputs that are returned, and besides them at most
    those that are updated in place. A graph per physical core may list the same tensor: it counts
    once, by name; or one graph lists them all. Where none lists an input, nothing is compared.
    """
    if neff.digest == "differs":
        return [f"is damaged: its archive is not the one its header's {neff.digest_scheme} is of"]
    faults = []
    if neff.target != ANY_TARGET and target not in targets_of(neff.target):
        known = ", ".join(targets_of(neff.target)) or "a chip nxbucket does not know"
        faults.append(f"is for {known} ({neff.target!r}), not for {target}")
    if neff.lnc is not None and neff.lnc != lnc:
        faults.append(f"is for logical cores of {neff.lnc}, not of {lnc} (lnc)")
    if len(neff.graphs) != lnc:
        faults.append(f"has {len(neff.graphs)} graphs; a logical core of {lnc} takes {lnc}")
    if any(t.kind == "input" for t in neff.tensors):
        faults += _size_faults(neff, signature)
    return faults


def _size_faults(neff: Neff, signature: ProgramSignature) -> list[str]:
    """Of all graphs together; none if one graph alone has every tensor."""
    together = _fault_of_sizes(neff.tensors, signature)
    alone = [[t for t in neff.tensors if t.graph == graph] for graph in neff.graphs]
    if not all(_fault_of_sizes(tensors, signature) for tensors in alone):
        return []
    return together


def _fault_of_sizes(tensors: Iterable[NeffTensor], signature: ProgramSignature) -> list[str]:
    found: dict[str, Counter[int]] = {"input": Counter(), "output": Counter()}
    for (kind, _), size in {(t.kind, t.name): t.size_bytes for t in tensors}.items():
        found[kind][size] += 1
    returned = Counter(_size(t) for t in signature.outputs if t.alias is None)
    in_place = Counter(_size(t) for t in signature.outputs if t.alias is not None)
    wanted = Counter(_size(t) for t in signature.inputs)
    return [
        *_differences("input", wanted - found["input"], found["input"] - wanted),
        *_differences(
            "output", returned - found["output"], found["output"] - (returned + in_place)
        ),
    ]


def _size(tensor: TensorSpec) -> int:
    return tensor.num_elements * ITEM_BYTES[tensor.dtype]


def _differences(kind: str, missing: Counter[int], extra: Counter[int]) -> list[str]:
    parts = [
        f"{word} {_shown(sizes)}" for word, sizes in (("lacks", missing), ("has", extra)) if sizes
    ]
    return [f"has other {kind}s than the program: it {' and '.join(parts)}"] if parts else []


def _shown(sizes: Counter[int]) -> str:
    shown = [f"{count} of {size} bytes" for size, count in sorted(sizes.items())]
    return ", ".join(shown[:4]) + (", …" if len(shown) > 4 else "")
