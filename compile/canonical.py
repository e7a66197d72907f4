"""Canonical JSON and its digest: the one form in which key inputs are hashed."""

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, ASCII; floats by repr, which round-trips. NaN is refused."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def sha256_hex(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def digest_of(value: Any) -> str:
    """sha256 of the canonical JSON of `value`, 64 hex digits."""
    return sha256_hex(canonical_json(value))


def file_sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
