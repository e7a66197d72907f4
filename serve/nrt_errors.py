"""The Neuron runtime's status codes as sentences.

Names, numbers and meanings: neuron-runtime/api/nrt_status.rst of aws-neuron-sdk. How a status
stands in an exception's text is not documented; vllm-project/vllm#12443 shows
`nrt_tensor_allocate status=4 message="Allocation Failure"`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nxbucket.toolkit.errors import BindError


@dataclass(frozen=True)
class Status:
    code: int
    name: str
    sentence: str
    mend: str


STATUSES = (
    Status(
        2,
        "NRT_INVALID",
        "the program or one of its tensors is not what the runtime expects",
        "nxbucket cache verify; if that is clean, the compiler and the runtime are of different "
        "releases: compile again with this host's",
    ),
    Status(
        4,
        "NRT_RESOURCE",
        "the device has no memory left for it",
        "end what else runs there (neuron-ls), or lower max_num_seqs, max_model_len or "
        "num_gpu_blocks_override and compile again",
    ),
    Status(
        9,
        "NRT_LOAD_NOT_ENOUGH_NC",
        "there are not as many free NeuronCores as it takes",
        "end what else runs there (neuron-ls), or choose others with NEURON_RT_VISIBLE_CORES",
    ),
    Status(
        10,
        "NRT_UNSUPPORTED_NEFF_VERSION",
        "a newer compiler than this host's runtime wrote it, or for another chip",
        "install aws-neuronx-runtime-lib of the compiler's release, or compile with this host's "
        "neuronx-cc",
    ),
    Status(
        11,
        "NRT_FAIL_HOST_MEM_ALLOC",
        "this host has no memory left",
        "free memory on the host, or take a larger instance",
    ),
    Status(
        1006,
        "NRT_EXEC_OOB",
        "it read or wrote outside of a tensor",
        "report it with `nxbucket cache show` of the program: a bucket's inputs must not do that",
    ),
)
BY_CODE = {status.code: status for status in STATUSES}
BY_NAME = {status.name: status for status in STATUSES}

CODE = re.compile(r"\bstatus(?:[ _]code)?\s*[=:]?\s*(\d+)\b", re.IGNORECASE)
NAME = re.compile(r"\bNRT_[A-Z_]+\b")


def find_status(text: str) -> Status | None:
    """The first known status that `text` names, by name or by number."""
    for name in NAME.findall(text):
        if name in BY_NAME:
            return BY_NAME[name]
    for code in CODE.findall(text):
        if int(code) in BY_CODE:
            return BY_CODE[int(code)]
    return None


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turns what the runtime raises while `what` is loaded into a BindError."""
    try:
        yield
    except RuntimeError as err:
        status = find_status(str(err))
        if status is None:
            first_line = str(err).partition("\n")[0]
            raise BindError(
                f"{what}: the Neuron runtime refuses: {first_line}",
                hint="nxbucket doctor; docs/hardware.md says how to look further",
            ) from err
        raise BindError(f"{what}: {_said(status)}", hint=status.mend) from err


@contextmanager
def running(program: str) -> Iterator[None]:
    """A server cannot go on after this: the engine ends, and its log has the mend."""
    try:
        yield
    except RuntimeError as err:
        status = find_status(str(err))
        if status is None:
            raise
        raise RuntimeError(f"{program}: {_said(status)}; to mend it: {status.mend}") from err


def _said(status: Status) -> str:
    return f"{status.sentence} ({status.name}, status {status.code} of the Neuron runtime)"
