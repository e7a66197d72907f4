"""What a .pt2 of target cpu says of itself. It is a zip: read without torch, and not unpacked."""

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

from nxbucket.toolkit.errors import ArtifactError

MAX_NOTE_BYTES = 1 << 20
"""Of a member that is read: notes of a few lines. A zip can unpack to a thousand times its size."""
DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError, OSError, RuntimeError,
    ValueError,
)  # fmt: skip
"""What zipfile raises over a file that is none, or no longer."""


def read_package(path: Path) -> dict[str, Any]:
    """Size, members, and the compiler's own metadata. Raises ArtifactError.

    AOTInductor records processor and vector instructions, and no version of torch: the lock and
    the cache's entry have that.
    """
    try:
        with zipfile.ZipFile(path) as package:
            members = package.infolist()
            metadata: dict[str, str] = {}
            for member in members:
                if member.filename.endswith("_metadata.json"):
                    metadata |= _metadata(package, member)
            version = _note(package, members, "/archive_version")
            kind = _note(package, members, "/archive_format")
    except DAMAGE as err:
        raise ArtifactError(
            f"{path} is a damaged package: {err}", hint="nxbucket compile makes it again"
        ) from err
    return {
        "size_bytes": path.stat().st_size,
        "archive_format": kind,
        "archive_version": version,
        "torch": metadata.pop("AOTI_TORCH_VERSION", None),
        "metadata": metadata,
        "members": [{"name": m.filename, "size_bytes": m.file_size} for m in members],
    }


def _metadata(package: zipfile.ZipFile, member: zipfile.ZipInfo) -> dict[str, str]:
    raw = json.loads(_read(package, member))
    return {str(k): str(v) for k, v in raw.items()} if isinstance(raw, dict) else {}


def _note(package: zipfile.ZipFile, members: list[zipfile.ZipInfo], ending: str) -> str | None:
    for member in members:
        if member.filename.endswith(ending):
            return _read(package, member).decode().strip()
    return None


def _read(package: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is compressed in a way torch does not write")
    with package.open(member) as f:
        return f.read(MAX_NOTE_BYTES)
