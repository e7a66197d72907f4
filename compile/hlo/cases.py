"""Inputs that a wrong program cannot pass: what `verify-hlo` runs each program on.

A step as the runner would give it, at every length where something changes (blocks, segments,
windows, the ends of the bucket and of the block table), and nastier than the runner: blocks in
random order, block tables that end in stale numbers, every slot that holds no token filled with
NaN, infinities or large numbers. Norms are not 1, biases not 0, keys and values all different. What
would hide a mistake is avoided:
- the values near each of those lengths are larger than the rest, so that one token too many or too
  few in a long context shows;
- the keys of some cases have a large vector in common, so that a softmax that does not subtract its
  maximum overflows. It cancels in a right one; keys that are large each in its own way would make
  deep models chaotic, and nothing could be compared;
- what a norm is given is about as small as its epsilon, or a wrong epsilon would show nowhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from nxbucket.compile.padding import decode_inputs, prefill_inputs
from nxbucket.compile.program import SCRATCH_SLOT, BucketProgram
from nxbucket.compile.programs.weights import weight_specs
from nxbucket.toolkit.architecture import Architecture

FILLERS = (float("nan"), float("inf"), float("-inf"), 1e4)
LOUD = 4.0
"""How much larger the values are that stand where a length changes something."""
SHIFT, SHIFTED_EVERY = 20.0, 5
"""How large what the keys have in common is, in one case of so many."""
NUM_RANDOM = 3


@dataclass(frozen=True)
class Case:
    """One step. `lengths`: each sequence's tokens, this step's included; `new`: those of this step.

    `rows`: of the program's output, how many are somebody's.
    """

    name: str
    lengths: tuple[int, ...]
    new: int
    inputs: dict[str, Tensor]
    slots: Tensor
    """Those that this step writes, padding's scratch slot left out."""
    tables: tuple[tuple[int, ...], ...]
    """Each sequence's blocks, in order."""
    filler: float
    shifted: bool
    seed: int

    @property
    def rows(self) -> int:
        return len(self.lengths)


def cases_of(program: BucketProgram, seed: int = 0) -> list[Case]:
    """The same for the same program and seed, on any host."""
    generator = torch.Generator().manual_seed(seed)
    steps = _prefill_steps if program.phase == "prefill" else _decode_steps
    made: list[Case] = []
    seen: set[tuple[tuple[int, ...], int]] = set()
    for name, lengths, new in steps(program, generator):
        if (lengths, new) not in seen:
            seen.add((lengths, new))
            made.append(_case(program, name, lengths, new, len(made), seed, generator))
    return made


def longest(program: BucketProgram) -> int:
    """Tokens of the longest sequence that block table and KV cache hold."""
    return min(program.max_blocks, program.num_kv_blocks - 1) * program.block_size


def edges(program: BucketProgram) -> list[int]:
    """Lengths at which something changes, from 1 to the longest sequence."""
    size, end = program.block_size, longest(program)
    arch = program.architecture
    windows = {arch.window_of(i) for i in range(arch.num_hidden_layers)} - {None}
    at = {size, end - size, *(w for w in windows if w is not None)}
    if program.kv_segment_size is not None:
        segment = program.kv_segment_size
        at |= {segment, 2 * segment, (end - 1) // segment * segment}
    near = {a + d for a in at for d in (-1, 0, 1)} | {1, 2, end - 1, end}
    return sorted(n for n in near if 1 <= n <= end)


def random_weights(arch: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """float32, by program name: norms get values of the size of their epsilon's root, and what they
    return, scores and logits are near 1, whatever the model's sizes."""
    generator = torch.Generator().manual_seed(seed)
    small = 3 * arch.rms_norm_eps**0.5
    weights = {}
    for spec in weight_specs(arch):
        kind = spec.name.split(".")[-1]
        noise = torch.randn(spec.shape, generator=generator)
        if "norm" in kind:
            noise = noise.mul_(0.2).add_(1.0)
        elif len(spec.shape) == 1:
            noise = noise.mul_(0.3)
        else:
            noise = noise.mul_(1.2 / spec.shape[1] ** 0.5)
        if kind in ("o", "o_bias", "down", "down_bias"):
            noise = noise.mul_(small)
        elif kind == "embed_tokens":
            noise = noise.mul_(small * spec.shape[1] ** 0.5)
        elif kind == "norm" and arch.tie_word_embeddings:
            noise = noise.mul_(1 / (small * arch.hidden_size**0.5))
        elif kind == "q_norm":
            noise = noise.mul_(2)
        elif kind in ("qkv", "qkv_bias"):
            rows = sum(spec.source_rows[:2])
            noise[:rows] *= small if arch.qk_norm else 1.6
        weights[spec.name] = noise
    return weights


def kv_before(program: BucketProgram, case: Case) -> dict[str, Tensor]:
    """The KV cache as the step finds it, in the program's dtype."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, program.dtype)
    owned, loud = _owned_slots(program, case)
    caches = {}
    for spec in program.signature.of_role("kv_cache"):
        cache = torch.full(spec.shape, case.filler, dtype=dtype)
        rows = torch.randn((len(owned), *spec.shape[2:]), generator=generator)
        if spec.name.startswith("value"):
            rows[loud] *= LOUD
        elif case.shifted:
            rows += SHIFT * torch.randn(spec.shape[2:], generator=generator)
        cache.flatten(0, 1)[owned] = rows.to(dtype)
        caches[spec.name] = cache
    return caches


def _owned_slots(program: BucketProgram, case: Case) -> tuple[Tensor, Tensor]:
    """Slots that hold a token before the step, and which of these hold one near an edge."""
    arch = program.architecture
    around = {n + d for n in edges(program) for d in (-1, 0)}
    slots: list[Tensor] = []
    loud: list[Tensor] = []
    for length, table in zip(case.lengths, case.tables, strict=True):
        positions = torch.arange(length - case.new)
        slots.append(_slots(table, positions, program.block_size))
        starts = {length - (arch.window_of(i) or 0) for i in range(arch.num_hidden_layers)}
        near = around | {s + d for s in starts for d in (-2, -1, 0, 1)}
        loud.append(torch.isin(positions, torch.tensor(sorted(near))))
    # Sequences may share blocks.
    owned, first = torch.unique(torch.cat(slots), return_inverse=True)
    is_loud = torch.zeros(len(owned), dtype=torch.bool)
    is_loud[first[torch.cat(loud)]] = True
    return owned, is_loud


Step = tuple[str, tuple[int, ...], int]


def _prefill_steps(program: BucketProgram, generator: torch.Generator) -> Iterator[Step]:
    size, end = program.size, longest(program)

    def chunk(name: str, context: int, new: int) -> Step:
        return f"{name}: {new} tokens after {context}", (context + new,), new

    full = min(size, end)
    yield chunk("full bucket", 0, full)
    yield chunk("one token", 0, 1)
    yield chunk("last position", end - 1, 1)
    yield chunk("full to the end", end - full, full)
    yield chunk("one token after another", 1, 1)
    for edge in edges(program):
        if edge < end:
            yield chunk("context at an edge", edge, _pick(1, min(size, end - edge), generator))
        new = _pick(1, min(size, edge), generator)
        yield chunk("end at an edge", edge - new, new)
    for _ in range(NUM_RANDOM):
        new = _pick(1, full, generator)
        yield chunk("random", _pick(0, end - new, generator), new)


def _decode_steps(program: BucketProgram, generator: torch.Generator) -> Iterator[Step]:
    end = longest(program)
    # Each row has a last block of its own; what comes before it can be shared.
    rows = min(
        program.size, max(1, program.num_kv_blocks - 1 - (ceil(end / program.block_size) - 1))
    )

    def batch(name: str, lengths: Sequence[int]) -> Step:
        shown = ", ".join(map(str, lengths[:8])) + (", …" if len(lengths) > 8 else "")
        return f"{name}: lengths {shown}", tuple(lengths), 1

    yield batch("all at the end", [end] * rows)
    yield batch("all of one token", [1] * rows)
    at = edges(program)
    shuffled = [at[i] for i in torch.randperm(len(at), generator=generator).tolist()]
    for start in range(0, len(at), rows):
        lengths = [shuffled[(start + i) % len(at)] for i in range(rows)]
        yield batch("edges", lengths)
    if rows > 1:
        yield batch("shortest beside longest", [1 if i % 2 else end for i in range(rows)])
        yield batch("one row", [_pick(1, end, generator)])
        yield batch("padding", [_pick(1, end, generator) for _ in range(rows - 1)])
    for _ in range(NUM_RANDOM):
        yield batch("random", [_pick(1, end, generator) for _ in range(rows)])


def _case(
    program: BucketProgram,
    name: str,
    lengths: tuple[int, ...],
    new: int,
    number: int,
    seed: int,
    generator: torch.Generator,
) -> Case:
    size, blocks = program.block_size, program.num_kv_blocks
    tables = _tables(program, lengths, generator)
    positions = [torch.arange(length - new, length) for length in lengths]
    slots = torch.cat([_slots(t, p, size) for t, p in zip(tables, positions, strict=True)])
    tokens = torch.randint(program.architecture.vocab_size, (len(slots),), generator=generator)
    stale = torch.randint(
        blocks, (len(lengths), program.max_blocks), generator=generator, dtype=torch.int32
    )
    for row, table in zip(stale, tables, strict=True):
        row[: len(table)] = torch.tensor(table)
    where = torch.cat(positions)
    if program.phase == "prefill":
        inputs = prefill_inputs(program.size, program.max_blocks, tokens, where, slots, stale[0])
    else:
        inputs = decode_inputs(program.size, tokens, where, slots, stale)
    filler = FILLERS[number % len(FILLERS)]
    shifted = number % SHIFTED_EVERY == SHIFTED_EVERY - 1
    own_seed = seed * 1_000_003 + number
    return Case(name, lengths, new, inputs, slots, tables, filler, shifted, own_seed)


def _tables(
    program: BucketProgram, lengths: tuple[int, ...], generator: torch.Generator
) -> tuple[tuple[int, ...], ...]:
    """Blocks in random order; where there are too few, sequences share all but their last one."""
    free = [1 + i for i in torch.randperm(program.num_kv_blocks - 1, generator=generator).tolist()]
    counts = [ceil(length / program.block_size) for length in lengths]
    if sum(counts) <= len(free):
        taken = iter(free)
        return tuple(tuple(next(taken) for _ in range(count)) for count in counts)
    last, shared = free[: len(lengths)], free[len(lengths) :]
    return tuple((*shared[: count - 1], own) for count, own in zip(counts, last, strict=True))


def _slots(table: Sequence[int], positions: Tensor, block_size: int) -> Tensor:
    found = torch.tensor(table)[positions // block_size] * block_size + positions % block_size
    assert not (found == SCRATCH_SLOT).any()
    return found


def _pick(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))
