"""Files that are there whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Under a name of its own first: two processes may write the same file at the same moment.

    Raises OSError; then what was at `path` is as it was.
    """
    staged = path.with_name(f".{os.getpid()}.{path.name[:200]}.tmp")
    try:
        staged.write_bytes(content)
        staged.replace(path)
    finally:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
