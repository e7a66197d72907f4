"""Where a model's config.json is: in a folder, or on the hub."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nxbucket.toolkit.buckets import show
from nxbucket.toolkit.errors import ModelLookupError
from nxbucket.toolkit.hub import fetch_config, is_hub_id

CommitOf = Callable[[str, str | None], str | None]
"""From a hub id and its `revision` to the revision to ask the hub for."""


def ask_the_hub(model: str, revision: str | None) -> str | None:
    """What `revision` is today. The other CommitOf is a lock's: what it was at compile time."""
    return revision


@dataclass(frozen=True)
class FoundModel:
    """`commit`: of a hub id, whose folder is in the hub's cache on this host. Else None."""

    folder: Path
    commit: str | None


def find_model(
    model: str, revision: str | None, beside: Path, commit_of: CommitOf = ask_the_hub
) -> FoundModel:
    """As vLLM does: a folder of that name, relative to `beside`, wins over a hub id.

    Raises ModelLookupError, or EnvironmentProblem for a hub that cannot be reached.
    """
    folder = beside / model
    try:
        found = folder.is_dir()
    except OSError:
        found = False  # a name too long for the file system
    if found:
        return FoundModel(folder, None)
    if is_hub_id(model):
        snapshot = fetch_config(model, commit_of(model, revision))
        return FoundModel(snapshot.folder, snapshot.commit)
    raise ModelLookupError(
        "model-not-found",
        f"no folder {show(str(folder), 300)}",
        hint="give the folder that holds config.json (relative paths start at the model file), or "
        "a hub id: org/name",
    )
