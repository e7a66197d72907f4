"""What neuronx-cc's errors mean, and which line of a model file mends them.

The codes are those of compiler/error-codes in the SDK's documentation (2.32); AWS's advice there is
for people who write the graph, ours for people who write a model file. How a killed or crashed part
of the compiler shows ([F137] and its like) is not documented and comes from public logs.
"""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from nxbucket.compile.failure import ProgramFailed

CODE = re.compile(r"\bNCC_[A-Z]{2,6}[0-9]{3}\b")
DRIVER_CODE = re.compile(r"\[F(134|137|139)\]")
"""128 and the number of the signal that ended one of the compiler's own processes."""

HBM = (
    "lower max_num_seqs, max_model_len or num_gpu_blocks_override, end num_batched_tokens_buckets "
    "lower (with max_num_batched_tokens), or set neuron_config.kv_segment_size_buckets"
)
INSTRUCTIONS = (
    "make the program smaller: end num_batched_tokens_buckets (max_num_batched_tokens) or "
    "num_seqs_buckets (max_num_seqs) lower, or set neuron_config.kv_segment_size_buckets"
)
DTYPE = "set dtype: bfloat16, and delete what compiler.flags says of number types"
KERNELS = "upgrade neuronx-cc and its nki package together, and delete flags that name kernels"
FLAGS = "delete or correct compiler.flags"
OURS = "no line of the model file asks for this: please report it, with this log and the .hlo file"
OPERATORS = f"{OURS}; `neuronx-cc list-operators --framework XLA` lists what it knows"
AGAIN = "nxbucket compile builds only what is missing: run it once more"
MEMORY = (
    "compile fewer at a time (`nxbucket compile --jobs 1`), or on a host with more memory; one "
    "neuronx-cc takes 5 to 25 GB"
)
CRASH = (
    "compiler.optlevel: 1 asks least of the compiler; if it is so already, try another release of "
    "neuronx-cc, and report the log to AWS"
)


@dataclass(frozen=True)
class Meaning:
    """`sentence` goes on from "the program"."""

    sentence: str
    mend: str


_HBM = Meaning("needs more memory than its core's HBM has", HBM)
_INSTRUCTIONS = Meaning("becomes more instructions than the compiler takes", INSTRUCTIONS)
_OPERATOR = Meaning("has an operator that this compiler does not know", OPERATORS)
_CUSTOM_CALL = Meaning("has a custom call that this compiler does not know", OURS)
_FP8 = Meaning("has an 8-bit float of a kind that the target lacks", DTYPE)
_QUANTIZE = Meaning("has a QuantizeMX call that the compiler does not take", OURS)
_SCALED = Meaning("has a ScaledMatmul call that the compiler does not take", OURS)
_WINDOW = Meaning("has a reduce-window that the compiler does not take", OURS)
_CONVOLUTION = Meaning("has a convolution that the compiler does not take", OURS)


def _downcast(operation: str, name: str) -> Meaning:
    return Meaning(
        f"has {operation} of integers that would lose precision, and --implicit-integer-downcast "
        "forbids that",
        f'compiler.flags: allow it with "--implicit-integer-downcast={name}", or delete that flag',
    )


MEANINGS = {
    "NCC_EARG001": Meaning(
        "is to run on logical cores that the target does not have",
        "compiler.lnc: 1 on trn1, trn1n and inf2; 1 or 2 on trn2 and trn3",
    ),
    "NCC_EBIR023": Meaning("has an MLP kernel wider than 4096", KERNELS),
    "NCC_EBVF030": _INSTRUCTIONS,
    "NCC_EHCA005": _CUSTOM_CALL,
    "NCC_EMOD025": Meaning("has a shape that is not static", OURS),
    "NCC_EOCP001": Meaning(
        "was given an option of another target",
        "delete from compiler.flags what was meant for another target (fp8 options of trn2 on "
        "trn3)",
    ),
    "NCC_EOOM001": _HBM,
    "NCC_EOOM002": _HBM,
    "NCC_ESFH002": Meaning("has an unsigned constant of more than 32 bits", OURS),
    "NCC_ESPP004": Meaning("has a number type that the target lacks", DTYPE),
    "NCC_ESPP047": _FP8,
    "NCC_EUOC002": _OPERATOR,
    "NCC_EVRF001": _OPERATOR,
    "NCC_EVRF004": Meaning("has complex numbers, which the target lacks", OURS),
    "NCC_EVRF005": _FP8,
    "NCC_EVRF006": Meaning("asks for a random number algorithm by name", OURS),
    "NCC_EVRF007": _INSTRUCTIONS,
    "NCC_EVRF009": _HBM,
    "NCC_EVRF010": _CONVOLUTION,
    "NCC_EVRF011": _CONVOLUTION,
    "NCC_EVRF013": Meaning("takes the top k of integers, which the target cannot", OURS),
    "NCC_EVRF015": _CUSTOM_CALL,
    "NCC_EVRF016": Meaning("scatters and reduces integers, which the target cannot", OURS),
    "NCC_EVRF017": _WINDOW,
    "NCC_EVRF018": _WINDOW,
    "NCC_EVRF019": _WINDOW,
    "NCC_EVRF022": Meaning("shifts integers that are not of 32 bits", OURS),
    "NCC_EVRF031": Meaning("scatters out of bounds", OURS),
    "NCC_EVRF035": _downcast("a matrix product", "dot"),
    **{f"NCC_EVRF{n:03}": _QUANTIZE for n in (*range(36, 43), 57, 58)},
    **{f"NCC_EVRF{n:03}": _SCALED for n in (*range(43, 51), 53, 54, 55)},
    "NCC_EVRF051": Meaning("has the number type F8E4M3FN, which trn1 and trn2 lack", DTYPE),
    "NCC_EVRF052": Meaning("has the number type F8E4M3, which the target lacks", DTYPE),
    "NCC_EVRF056": Meaning(
        "gathers out of bounds: a sequence is longer than a table of positions",
        "max_model_len must not exceed max_position_embeddings of config.json",
    ),
    "NCC_EVRF059": Meaning("names a kernel file that is not on this host", KERNELS),
    "NCC_EVRF060": _downcast("a scatter", "scatter"),
    "NCC_EVRF061": _downcast("an all-reduce", "all_reduce"),
    "NCC_EVRF062": _downcast("a power", "pow"),
    "NCC_EVRF063": _downcast("a reduce-scatter", "reduce_scatter"),
    "NCC_EVRF064": Meaning("has an instruction whose shapes XLA forbids", OURS),
    "NCC_EVRF065": Meaning("has a kernel that an older nki traced", KERNELS),
    "NCC_EXSP001": _HBM,
    "NCC_EXTP004": _INSTRUCTIONS,
    "NCC_ILKK005": Meaning("met a race between kernels that are compiled at a time", AGAIN),
}
RETRYABLE = frozenset({"NCC_ILKK005"})


def find_codes(text: str) -> list[str]:
    """In the order of their first appearance."""
    return list(dict.fromkeys(CODE.findall(text)))


def failure_of_codes(codes: Iterable[str]) -> ProgramFailed | None:
    """None without a code. Of several, a documented one says most."""
    found = list(codes)
    if not found:
        return None
    code = next((c for c in found if c in MEANINGS), found[0])
    meaning = MEANINGS.get(code)
    if meaning is None:
        what = "an error of its own" if code.startswith("NCC_I") else "an error"
        return ProgramFailed(
            f"reports {code}, {what} that nxbucket does not know; the log says what it is",
            hint=CRASH if code.startswith("NCC_I") else FLAGS + ", or mend what the log says",
        )
    return ProgramFailed(
        f"reports {code}: the program {meaning.sentence}",
        hint=meaning.mend,
        retryable=set(found) <= RETRYABLE,
    )


def failure_of_exit(returncode: int, output: str, codes: Iterable[str], oom: bool) -> ProgramFailed:
    """Why neuronx-cc ended as it did. `oom`: the kernel says that it killed for memory meanwhile.

    A code of the compiler's own says more than how it ended. It often survives what kills one of
    its processes, and then ends with 70 and [F137]; 70 alone says nothing.
    """
    if (failure := failure_of_codes(codes)) is not None:
        return failure
    number = -returncode if returncode < 0 else 0
    if number == 0 and (driver := DRIVER_CODE.search(output)) is not None:
        number = int(driver[1]) - 128
    if number == 0 and returncode in (134, 137, 139):
        number = returncode - 128
    if number == signal.SIGKILL:
        why = "this host or its container ran out of memory" if oom else "out of memory?"
        return ProgramFailed(f"was killed by SIGKILL ({why})", hint=MEMORY, retryable=True)
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        # An assertion or a bad pointer; a stray signal from outside may not come twice.
        return ProgramFailed(
            f"crashed with {name}, an error inside neuronx-cc",
            hint=CRASH,
            retryable=returncode < 0,
        )
    return ProgramFailed(f"ended with status {returncode} and no NCC code", hint=CRASH)
