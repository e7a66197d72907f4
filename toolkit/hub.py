"""Models by hub id, `org/name`: config.json for whoever compiles, the checkpoint for a server.

huggingface_hub does the work, into the cache it shares with transformers and vLLM, so HF_TOKEN,
HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_ENDPOINT mean what they mean there. It takes a third of
a second to import and is imported only when something has to be asked for.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nxbucket.toolkit.errors import EnvironmentProblem, ModelLookupError, NxbucketError

CONFIG = "config.json"
CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""The weights, the tokenizer in all its forms, and the configs beside them."""
NOT_OURS = ("*/*", "consolidated*")
"""Other forms of the same weights: `original/`, `onnx/`, Mistral's consolidated.safetensors."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Snapshot:
    """Files of one commit. The folder belongs to the hub's cache on this host."""

    folder: Path
    commit: str


def is_hub_id(model: str) -> bool:
    return len(model) <= 96 and _HUB_ID.fullmatch(model) is not None


def fetch_config(model: str, revision: str | None) -> Snapshot:
    """config.json at `revision` (a branch, a tag, a commit; None: main), and which commit that is.

    A branch is asked for every time; without network the last answer in the cache holds. A commit
    that is in the cache is not asked for. Raises ModelLookupError or EnvironmentProblem.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        pinned = _snapshot_folder(model, revision)
        if (pinned / CONFIG).is_file():
            return Snapshot(pinned, revision)
    with _hub_errors(model, revision):
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        try:
            _ask_for(model, CONFIG, revision)
        except Exception as err:
            cached = try_to_load_from_cache(model, CONFIG, revision=revision)
            if _is_an_answer(err) or not isinstance(cached, str):
                raise
            folder = Path(cached).parent
        else:
            folder = Path(hf_hub_download(model, CONFIG, revision=revision)).parent
        return Snapshot(folder, folder.name)


def fetch_checkpoint(model: str, commit: str) -> Path:
    """The weights and the tokenizer at `commit`; what the cache has is not fetched again.

    Raises ModelLookupError or EnvironmentProblem.
    """
    with _hub_errors(model, commit):
        from huggingface_hub import hf_hub_download, snapshot_download

        folder = Path(
            snapshot_download(
                model,
                revision=commit,
                allow_patterns=list(CHECKPOINT_FILES),
                ignore_patterns=list(NOT_OURS),
            )
        )
        # Without network an incomplete folder is handed out too: asking for a file that it lacks
        # raises the reason.
        for name in _missing_weights(folder):
            _ask_for(model, name, commit)
            hf_hub_download(model, name, revision=commit)
        return folder


def _ask_for(model: str, name: str, revision: str | None) -> None:
    """Raises what hf_hub_download would, but at once: that one tries for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    get_hf_file_metadata(hf_hub_url(model, name, revision=revision))


def _is_an_answer(err: Exception) -> bool:
    """The hub says that there is no such revision or file: what the cache has is no substitute."""
    from huggingface_hub import errors

    return isinstance(err, errors.RevisionNotFoundError | errors.RemoteEntryNotFoundError)


def _snapshot_folder(model: str, commit: str) -> Path:
    # This module of huggingface_hub reads the environment and imports nothing.
    from huggingface_hub import constants

    folder = f"models--{model.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE).expanduser() / folder / "snapshots" / commit


def _missing_weights(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [] if (folder / "model.safetensors").is_file() else ["model.safetensors"]
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
        return sorted(name for name in named if not (folder / name).is_file())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []  # whoever loads the weights says what is wrong with the index


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """What huggingface_hub raises, as a sentence and a mend."""
    try:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as err:
        raise EnvironmentProblem(
            f"{model} is a hub id, and huggingface_hub is not installed",
            hint="pip install huggingface_hub, or download the model and give its folder",
        ) from err
    # httpx in some releases, httpx2 in others.
    any_http_error: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except (OSError, HFValidationError, any_http_error) as err:
        raise _explained(err, model, revision) from err


def _explained(err: BaseException, model: str, revision: str | None) -> NxbucketError:
    from huggingface_hub import constants, errors

    at = constants.ENDPOINT
    if isinstance(err, errors.LocalEntryNotFoundError) and err.__cause__ is not None:
        return _explained(err.__cause__, model, revision)
    if isinstance(err, errors.OfflineModeIsEnabled):
        return EnvironmentProblem(
            f"HF_HUB_OFFLINE is set, and the hub's cache here does not hold {_at(model, revision)}",
            hint="unset HF_HUB_OFFLINE for one run, or set HF_HOME to the folder that has it; "
            f"cache searched: {constants.HF_HUB_CACHE}",
        )
    if isinstance(err, errors.GatedRepoError):
        return _gated(model, at)
    if isinstance(err, errors.RevisionNotFoundError):
        return ModelLookupError(
            "hub-revision",
            f"{model} has no revision {revision} on {at}",
            hint="give a branch, a tag or a full commit, or delete the line for the main branch; a "
            "lock's commit that is gone from the hub: `nxbucket compile` pins today's",
            key="revision",
        )
    if isinstance(err, errors.RepositoryNotFoundError):
        return ModelLookupError(
            "hub-not-found",
            f"no folder {model} beside this file, and no such model on {at} (or it is private)",
            hint="check the spelling; for a private model set HF_TOKEN or run `hf auth login`; "
            "for a folder, a relative path starts at the model file",
        )
    if isinstance(err, errors.RemoteEntryNotFoundError):
        name = str(err.response.request.url).rpartition("/")[2]
        return ModelLookupError(
            "hub-no-file",
            f"{_at(model, revision)} has no {name} on {at}",
            hint="take a checkpoint in transformers' format: config.json and safetensors "
            "(pickle files are never read)",
        )
    if isinstance(err, errors.HfHubHTTPError):
        return _refused(model, at, err.response.status_code)
    if isinstance(err, errors.HFValidationError):
        return ModelLookupError(
            "hub-id", f"{model} is no hub id: {err}", hint="write org/name, or a path"
        )
    if isinstance(err, OSError) and err.errno is not None and not isinstance(err, ConnectionError):
        return EnvironmentProblem(
            f"cannot write {model} to the hub's cache {constants.HF_HUB_CACHE}: {err.strerror}",
            hint="free space there (`hf cache prune`), or set HF_HOME to another folder",
        )
    return EnvironmentProblem(
        f"{model} is no folder beside this file, so it is read as a hub id, and {at} cannot be "
        f"reached: {_reason(err)}",
        hint="check the network and HF_ENDPOINT; without network, fill the hub's cache elsewhere "
        f"(`hf download {model}`), copy it, and set HF_HOME and HF_HUB_OFFLINE=1",
    )


def _gated(model: str, at: str) -> ModelLookupError:
    from huggingface_hub import get_token

    if get_token() is None:
        return ModelLookupError(
            "hub-gated",
            f"{model} is gated, and no token is set",
            hint=f"accept its licence at {at}/{model}, then set HF_TOKEN or run `hf auth login`",
        )
    return ModelLookupError(
        "hub-gated",
        f"{model} is gated, and the account of this token has no access to it",
        hint=f"accept its licence at {at}/{model}, or set HF_TOKEN to another account's",
    )


def _refused(model: str, at: str, status: int) -> NxbucketError:
    if status in (401, 403):
        return ModelLookupError(
            "hub-token",
            f"{at} refuses the token for {model} (HTTP {status})",
            hint="set HF_TOKEN to a valid token with read access to it: `hf auth login` stores one",
        )
    return EnvironmentProblem(
        f"{at} answers HTTP {status} for {model}",
        hint="too many requests: wait a minute, or set HF_TOKEN"
        if status == 429
        else "try again later; what is in the hub's cache works with HF_HUB_OFFLINE=1",
    )


def _at(model: str, revision: str | None) -> str:
    if revision is None:
        return model
    return f"{model} at {revision[:12] if _COMMIT.fullmatch(revision) else revision}"


def _reason(err: BaseException) -> str:
    text = str(err).partition("\n")[0].strip()
    return text or type(err).__name__
