"""Reports of a rate that was found, and of what a Diptych router said of itself during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from benchmarks.load.prediction import PredictionError
from benchmarks.load.probing import FoundRate, Probe
from benchmarks.load.report import print_table
from benchmarks.load.watch import DraftsMade, ServerWatch, WorkerCost

COLUMNS = ("requests/s", "within goals", "of", "95 % interval", "TTFT ms", "TPOT ms", "seconds", "verdict")


def print_server(
    console: Console,
    cost: WorkerCost | None,
    errors: Mapping[str, PredictionError],
    drafts: DraftsMade | None = None,
    *,
    num_tokens: int,
) -> None:
    """Print worker-seconds, their price, accepted draft tokens, and how far predictions were off, where known."""
    if cost is not None:
        by_role = ", ".join(f"{role} {seconds:,.0f}" for role, seconds in sorted(cost.worker_s.items()))
        _line(console, "worker-seconds", f"{math.fsum(cost.worker_s.values()):,.0f} ({by_role})")
        if cost.cost:
            price = cost.per_million(num_tokens)
            _line(console, "cost", f"{cost.cost:.4g}; {price:.4g} for a million output tokens")
    if drafts is not None:
        by_place = ", ".join(f"{count / drafts.num_drafts:.0%}" for count in drafts.accepted)
        said = f"{sum(drafts.accepted):,} of {drafts.num_tokens:,} draft tokens ({drafts.share:.0%})"
        _line(console, "accepted", f"{said}, {drafts.mean_length:.2f} tokens a step with drafts; by place {by_place}")
    for name, error in errors.items():
        said = f"off by p50 {error.p50:.0%}, p90 {error.p90:.0%} of {name} ({error.num} requests)"
        _line(console, f"predicted {name}", f"{said}; measured over predicted p50 {error.ratio_p50:.2f}")


def server_result(watch: ServerWatch, cost: WorkerCost | None, *, num_tokens: int) -> dict[str, Any]:
    """The same as JSON values."""
    found: dict[str, Any] = {}
    if cost is not None:
        found["workers"] = {
            "worker_seconds": {role: round(seconds, 1) for role, seconds in cost.worker_s.items()},
            "cost": cost.cost,
            "cost_per_million_output_tokens": cost.per_million(num_tokens),
            "over_time": [{"at_s": round(sample.at_s, 2), **sample.running} for sample in watch.samples],
        }
    if watch.drafts is not None:
        found["draft_tokens"] = asdict(watch.drafts)
    if watch.errors:
        found["prediction_errors"] = {name: asdict(error) for name, error in watch.errors.items()}
    return found


def print_rate(console: Console, found: FoundRate, *, title: str, goals: str, quantile: float) -> None:
    """Print a row for each trial, and the answer."""
    print_table(console, f"{title} (latencies at p{quantile * 100:g})", COLUMNS, map(_cells, found.probes), left=(7,))
    _line(console, "highest rate", answer(found, f"{quantile:.4g} of requests within {goals}"))


def answer(found: FoundRate, goals: str) -> str:
    """The result in a sentence."""
    if not found.rate:
        tried = [probe.rate for probe in found.probes if probe.rate]
        lowest = f"even {min(tried):.3g} requests/s" if tried else "even one request at a time"
        return f"none: {lowest} had fewer than {goals}"
    above = f"{found.missed:.3g} had fewer" if math.isfinite(found.missed) else "no higher rate missed"
    close = [probe for probe in found.probes if probe.rate == found.rate and not probe.verdict.is_sure]
    doubt = "; that is close, the interval includes the goal" if close else ""
    return f"{found.rate:.3g} requests/s with {goals} ({above}{doubt})"


def rate_result(found: FoundRate) -> dict[str, Any]:
    """All trials and the answer as JSON values; NaN and infinity are null."""
    probes = [
        {
            "rate": probe.rate,
            "seconds": round(probe.seconds, 2),
            "ttft_ms": _finite(probe.ttft_ms),
            "tpot_ms": _finite(probe.tpot_ms),
            "share": probe.verdict.share,
            **asdict(probe.verdict),
        }
        for probe in found.probes
    ]
    return {"answer": {"rate": found.rate, "lowest_missed": _finite(found.missed)}, "probes": probes}


def probe_line(probe: Probe) -> str:
    """One trial in a line, while the search goes on."""
    rate, share, num, interval, ttft, tpot, seconds, verdict = _cells(probe)
    return f"{rate} requests/s: {share} of {num} ({interval}) in {seconds} s, TTFT {ttft} ms, TPOT {tpot} ms: {verdict}"


def _cells(probe: Probe) -> tuple[str, ...]:
    verdict = probe.verdict
    words = ("" if verdict.is_sure else "about: ") + ("holds" if verdict.holds else "misses")
    return (
        f"{probe.rate:.3g}" if probe.rate else "one at a time",
        f"{verdict.share:.1%}",
        f"{verdict.num}",
        f"{verdict.low:.1%} to {verdict.high:.1%}",
        _number(probe.ttft_ms),
        _number(probe.tpot_ms),
        f"{probe.seconds:.0f}",
        words,
    )


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.1f}"


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _line(console: Console, name: str, value: str) -> None:
    console.print(f"{name:<22}{value}", highlight=False, markup=False)
