"""What `nxbucket advise` found, as YAML ready to paste with the rest in comments, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nxbucket.toolkit.choice.advise import Advice, Goal
from nxbucket.toolkit.choice.holdout import Holdout
from nxbucket.toolkit.choice.price import Price
from nxbucket.toolkit.choice.workload import Use

KEY_OF = {"prefill": "num_batched_tokens_buckets", "decode": "num_seqs_buckets"}
UNIT_OF = {"prefill": "tokens", "decode": "sequences"}
NAME_OF = {
    "powers_of_two": "powers of two",
    "percentiles": "percentiles",
    "now": "the lists of the model file",
}
NIL_SHARE = 0.005
"""Half a percent of what is executed, or of its time: less is no gain to speak of."""


@dataclass(frozen=True)
class AdviceReport:
    """`decode_from`: how the decode batches are known, or why they are not."""

    source: str
    requests: int | None
    refused: int
    goal: Goal
    prefill: Advice
    decode: Advice | None
    decode_from: str
    holdouts: list[Holdout]
    price: Price | None
    """Of compiling the lists; None without a model file."""
    notes: list[str]

    @property
    def advices(self) -> list[Advice]:
        return [self.prefill] + ([] if self.decode is None else [self.decode])

    @property
    def lists(self) -> dict[str, tuple[int, ...]]:
        """By their key in the model file."""
        return {KEY_OF[advice.phase]: advice.best.buckets for advice in self.advices}


def advice_text(report: AdviceReport) -> str:
    """Valid YAML: the lists, everything else in comments."""
    return "\n".join([*_head(report), *_lists(report), *_details(report)])


def _head(report: AdviceReport) -> Iterator[str]:
    goal = report.goal
    yield f"# {facts(report)['workload']}"
    least = "padding" if goal.minimizes == "tokens" else f"time ({goal.times.source})"
    entries = f"{goal.prefill.max_entries} and {goal.decode.max_entries} entries"
    if goal.max_compile_s is not None:
        entries += f", {goal.max_compile_s / 60:g} minutes of compiling in all"
    if goal.max_program_bytes is not None:
        entries += f", {goal.max_program_bytes} bytes of programs in all"
    yield f"# Lists of least {least}; at most {entries}; prefill on a grid of {goal.prefill.grid}."


def facts(report: AdviceReport) -> dict[str, str]:
    """For the heads of reports."""
    limits = report.goal.limits
    served = "" if report.requests is None else f"{report.requests:,} requests of "
    refused = f", {report.refused:,} of them refused for their length" if report.refused else ""
    length = "" if limits.max_model_len is None else f", max_model_len {limits.max_model_len}"
    return {
        "workload": f"{served}{report.source}{refused}",
        "limits": f"steps of at most {limits.max_num_batched_tokens} tokens or "
        f"{limits.max_num_seqs} sequences{length}",
        "least": "padding"
        if report.goal.minimizes == "tokens"
        else f"time: {report.goal.times.source}",
        "decode batches": report.decode_from,
    }


def _lists(report: AdviceReport) -> Iterator[str]:
    yield "neuron_config:"
    for advice in report.advices:
        others = ", ".join(
            f"{NAME_OF[name]} ({len(use.buckets)}) {percent(use.padding_share)}"
            for name, use in advice.compared.items()
        )
        yield f"  {KEY_OF[advice.phase]}: {list(advice.best.buckets)}"
        yield f"  # {percent(advice.best.padding_share)} of what is executed is padding; {others}"


def _details(report: AdviceReport) -> Iterator[str]:
    for advice in report.advices:
        yield ""
        yield f"# {advice.phase}: what one more entry is worth"
        by_time = advice.minimizes == "time"
        rows = [("entries", "padding", *(["time"] if by_time else []), "buckets")]
        for use in shown_curve(advice):
            chosen = " <- chosen" if use.buckets == advice.best.buckets else ""
            buckets = ", ".join(map(str, use.buckets))
            rows.append((str(len(use.buckets)), *_figures(advice, use), buckets + chosen))
        yield from _table(rows)
        if sentence := verdict(advice):
            yield f"# {sentence}"
    yield ""
    for holdout in report.holdouts:
        there = holdout.there
        by_time = there.minimizes == "time"
        yield (
            f"# {holdout.phase}: chosen on the first {holdout.fitted_on:,} requests, scored on the "
            f"{holdout.scored_on:,} behind them"
        )
        rows = [("", "padding", *(["time"] if by_time else []), "buckets")]
        for name, use in (
            ("chosen before", holdout.fitted),
            ("best there", holdout.best),
            ("powers of two", holdout.powers_of_two),
        ):
            rows.append((name, *_figures(there, use), ", ".join(map(str, use.buckets))))
        yield from _table(rows)
    yield f"# Decode batches: {report.decode_from}"
    if report.price is not None:
        yield f"# To compile: {report.price}"


def _figures(advice: Advice, use: Use) -> list[str]:
    shares = [percent(use.padding_share)]
    return [*shares, f"{advice.time_s(use):.4g} s"] if advice.minimizes == "time" else shares


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"#   {'  '.join(cells)}".rstrip()


def shown_curve(advice: Advice) -> tuple[Use, ...]:
    """Up to the first list that more entries do not improve."""
    shown: list[Use] = []
    for use in advice.curve:
        if shown and use.buckets == shown[-1].buckets:
            break
        shown.append(use)
    return tuple(shown)


def verdict(advice: Advice) -> str | None:
    """What a person should see in the curve: a gain that is none, entries that do little."""
    best, usual = advice.best, advice.compared["powers_of_two"]

    def is_as_good(use: Use, than: Use) -> bool:
        return advice.cost(use) <= (1 + NIL_SHARE) * advice.cost(than)

    sentences = []
    if advice.cost(usual) < advice.cost(best):
        sentences.append(
            f"powers of two do better, with {_entries(usual)}: the budget or the grid does not "
            "allow them"
        )
    elif is_as_good(usual, best):
        if len(best.buckets) < len(usual.buckets):
            sentences.append(
                f"as good as powers of two with {_entries(best)} instead of {len(usual.buckets)}"
            )
        else:
            sentences.append(
                f"nothing to gain over powers of two ({_entries(usual)}, "
                f"{percent(usual.padding_share)} padding)"
            )
    # A list chosen under a budget need not be on the curve.
    few = next((use for use in advice.curve if is_as_good(use, best)), best)
    if len(few.buckets) < len(best.buckets):
        sentences.append(
            f"{list(few.buckets)} would nearly do, with {_entries(few)} instead of "
            f"{len(best.buckets)}: {percent(few.padding_share)} padding"
        )
    return "; ".join(sentences) or None


def _entries(use: Use) -> str:
    return f"{len(use.buckets)} {'entry' if len(use.buckets) == 1 else 'entries'}"


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def advice_as_json(report: AdviceReport) -> dict[str, Any]:
    goal = report.goal
    limits = goal.limits
    return {
        "ok": True,
        "source": report.source,
        "requests": report.requests,
        "requests_refused": report.refused,
        "limits": {
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "max_model_len": limits.max_model_len,
        },
        "budget": {
            "max_prefill_entries": goal.prefill.max_entries,
            "max_decode_entries": goal.decode.max_entries,
            "max_compile_s": goal.max_compile_s,
            "max_program_bytes": goal.max_program_bytes,
        },
        "grid": goal.prefill.grid,
        "minimizes": goal.minimizes,
        "step_times": goal.times.source,
        "prefill": _advice_as_json(report.prefill),
        "decode": None if report.decode is None else _advice_as_json(report.decode),
        "decode_batches_from": report.decode_from,
        "holdout": {h.phase: _holdout_as_json(h) for h in report.holdouts} or None,
        "curve": _curve_as_json(report.advices),
        "to_compile": None if report.price is None else report.price.as_json(),
        "notes": report.notes,
    }


def _advice_as_json(advice: Advice) -> dict[str, Any]:
    return {
        **_use_as_json(advice, advice.best),
        "steps": advice.best.steps,
        f"real_{UNIT_OF[advice.phase]}": advice.best.real,
        f"executed_{UNIT_OF[advice.phase]}": advice.best.executed,
        "compared": {name: _use_as_json(advice, use) for name, use in advice.compared.items()},
        "verdict": verdict(advice),
    }


def _use_as_json(advice: Advice, use: Use) -> dict[str, Any]:
    return {**use.as_json(), "time_s": round(advice.time_s(use), 6)}


def _holdout_as_json(holdout: Holdout) -> dict[str, Any]:
    there = holdout.there
    return {
        "fitted_on": holdout.fitted_on,
        "scored_on": holdout.scored_on,
        **_use_as_json(there, holdout.fitted),
        "best_there": _use_as_json(there, holdout.best),
        "powers_of_two": _use_as_json(there, holdout.powers_of_two),
    }


def _curve_as_json(advices: Sequence[Advice]) -> list[dict[str, Any]]:
    """Point k: the best lists of at most k entries."""
    longest = max(len(advice.curve) for advice in advices)
    return [
        {
            "programs": programs,
            **{
                advice.phase: _use_as_json(
                    advice, advice.curve[min(programs, len(advice.curve)) - 1]
                )
                for advice in advices
            },
        }
        for programs in range(1, longest + 1)
    ]
