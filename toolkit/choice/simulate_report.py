"""What `nxbucket simulate` found: scenarios side by side, as a table and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nxbucket.serve.policy import BucketUse, padding_share
from nxbucket.toolkit.choice.simulator import Simulation

QUANTILES = (50, 95, 99)


def quantile(ordered: Sequence[float], percent: int) -> float | None:
    """Nearest rank; None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def simulations_table(simulations: Sequence[Simulation]) -> list[tuple[str, ...]]:
    """A row for each figure, a column for each scenario."""
    columns = [dict(_figures(simulation)) for simulation in simulations]
    head = ("", *(simulation.deployment.name for simulation in simulations))
    return [head, *((name, *(column[name] for column in columns)) for name in columns[0])]


def _figures(simulation: Simulation) -> Iterator[tuple[str, str]]:
    refused = f", {simulation.refused:,} refused" if simulation.refused else ""
    yield "requests", f"{len(simulation.rows):,}{refused}"
    yield "output tokens/s", f"{simulation.output_tokens_per_s:,.1f}"
    yield "requests/s", f"{simulation.requests_per_s:,.3f}"
    for name, values in _latencies(simulation).items():
        ordered = sorted(values)
        shown = (_duration(quantile(ordered, q)) for q in QUANTILES)
        yield f"{name} p50 / p95 / p99", " / ".join(shown)
    yield "prefill padding", f"{100 * padding_share(simulation.stats.prefill):.2f} %"
    yield "decode padding", f"{100 * padding_share(simulation.stats.decode):.2f} %"
    yield "queue mean / max", f"{simulation.queue_mean:,.1f} / {simulation.queue_max:,}"
    total = simulation.end_s or 1.0
    shares = " / ".join(
        f"{100 * simulation.phase_s[phase] / total:.0f} %"
        for phase in ("prefill", "decode", "idle")
    )
    yield "time in prefill / decode / idle", shares
    yield "ends after", _duration(simulation.end_s)
    for phase, uses in (
        ("prefill", simulation.stats.prefill),
        ("decode", simulation.stats.decode),
    ):
        yield (
            f"{phase} steps by bucket",
            " ".join(f"{bucket}:{use.executions}" for bucket, use in uses.items()),
        )


def _latencies(simulation: Simulation) -> dict[str, Sequence[float]]:
    return {
        "TTFT": simulation.ttft_s,
        "TPOT": simulation.tpot_s,
        "latency": simulation.latency_s,
    }


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:,.2f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def simulation_as_json(simulation: Simulation) -> dict[str, Any]:
    deployment = simulation.deployment
    return {
        "name": deployment.name,
        "num_batched_tokens_buckets": list(deployment.prefill_buckets),
        "num_seqs_buckets": list(deployment.decode_buckets),
        "max_consecutive_prefills": deployment.max_consecutive_prefills,
        "requests": len(simulation.rows),
        "requests_refused": simulation.refused,
        "end_s": round(simulation.end_s, 9),
        "output_tokens": simulation.output_tokens,
        "output_tokens_per_s": round(simulation.output_tokens_per_s, 6),
        "requests_per_s": round(simulation.requests_per_s, 6),
        **{
            f"{name.lower()}_s": _quantiles(values)
            for name, values in _latencies(simulation).items()
        },
        "prefill": _phase_as_json(simulation, "prefill", simulation.stats.prefill),
        "decode": _phase_as_json(simulation, "decode", simulation.stats.decode),
        "idle_s": round(simulation.phase_s["idle"], 9),
        "queue": {"mean": round(simulation.queue_mean, 6), "max": simulation.queue_max},
    }


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    shares = {f"p{q}": quantile(ordered, q) for q in QUANTILES}
    mean = sum(ordered) / len(ordered) if ordered else None
    return {
        name: None if value is None else round(value, 9)
        for name, value in {"mean": mean, **shares}.items()
    }


def _phase_as_json(
    simulation: Simulation, phase: str, uses: Mapping[int, BucketUse]
) -> dict[str, Any]:
    return {
        "time_s": round(simulation.phase_s[phase], 9),
        "padding_share": round(padding_share(uses), 6),
        "buckets": {
            str(bucket): {
                "steps": use.executions,
                "real": use.real,
                "padding": use.padding,
                "time_s": round(simulation.bucket_s[phase].get(bucket, 0.0), 9),
            }
            for bucket, use in uses.items()
        },
    }
