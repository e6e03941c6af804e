"""Draws a run: the distribution of its latencies, and a timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from benchmarks.load.probing import FoundRate
from benchmarks.load.summary import RequestRecord

NUM_BINS = 60
NUM_PARTS, LEAST_IN_PART = 40, 10
COLOURS = {"TTFT": "#2f6fb5", "TPOT": "#2b8a5b", "ITL": "#c9652b", "end to end": "#7a4fa3"}


def plot_run(
    path: Path, records: Sequence[RequestRecord], *, title: str, goals_ms: tuple[float, float] = (0.0, 0.0)
) -> None:
    """Draw cumulative distributions of the four latencies, a timeline of requests and tokens, and tails over time.

    `goals_ms`: of TTFT and TPOT, drawn beside their tails; 0 is none.
    """
    good = [record for record in records if record.ok]
    figure = Figure(figsize=(13, 11), layout="constrained")
    grid = figure.add_gridspec(3, 4, height_ratios=(1, 1.1, 0.9))
    latencies = {
        "TTFT": [record.ttft_s for record in good],
        "TPOT": [record.tpot_s for record in good],
        "ITL": [gap for record in good for gap in record.itls_s],
        "end to end": [record.e2e_s for record in good],
    }
    for column, (name, values) in enumerate(latencies.items()):
        plot_cdf(figure.add_subplot(grid[0, column]), name, {name: values})
    _plot_timeline(figure.add_subplot(grid[1, :]), good)
    _plot_tails(figure.add_subplot(grid[2, :]), records, goals_ms)
    save(figure, path, title)


def plot_rate(path: Path, found: FoundRate, *, quantile: float, title: str) -> None:
    """Draw the share of requests within goals by rate, with its interval, and the highest rate that held."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    tried = sorted((probe for probe in found.probes if probe.rate), key=lambda probe: probe.rate)
    shares = np.asarray([probe.verdict.share for probe in tried])
    below = np.maximum(0.0, shares - np.asarray([probe.verdict.low for probe in tried]))
    above = np.maximum(0.0, np.asarray([probe.verdict.high for probe in tried]) - shares)
    rates = [probe.rate for probe in tried]
    axes.errorbar(rates, shares, yerr=(below, above), fmt="o-", capsize=3, color=COLOURS["TTFT"])
    axes.axhline(quantile, color="#444444", linestyle="--", linewidth=1, label=f"goal: {quantile:.4g}")
    if found.rate:
        axes.axvline(found.rate, color=COLOURS["TPOT"], linewidth=1, label=f"{found.rate:.3g} requests/s")
    axes.set(xlabel="requests/s", ylabel="share within goals", ylim=(0, 1.02))
    axes.legend(loc="lower left", fontsize=8)
    axes.grid(alpha=0.2)
    save(figure, path, title)


def _plot_tails(axes: Any, records: Sequence[RequestRecord], goals_ms: tuple[float, float]) -> None:
    """Draw p95 of TTFT and TPOT of the requests that began in each part of the run, beside how many those were."""
    axes.set(title="by the time at which requests began", xlabel="seconds", ylabel="p95, ms")
    begun = [record for record in records if record.start]
    if len(begun) < 2:
        return
    origin = min(record.start for record in begun)
    starts = np.asarray([record.start - origin for record in begun])
    edges = np.linspace(0.0, float(starts.max()) or 1.0, min(NUM_PARTS, max(2, len(begun) // LEAST_IN_PART)) + 1)
    parts = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, edges.size - 2)
    for name, attribute, goal in zip(("TTFT", "TPOT"), ("ttft_s", "tpot_s"), goals_ms, strict=True):
        values = np.asarray([getattr(record, attribute) * 1000 if record.ok else math.nan for record in begun])
        tails = [_p95(values[parts == part]) for part in range(edges.size - 1)]
        axes.plot((edges[:-1] + edges[1:]) / 2, tails, "o-", markersize=3, color=COLOURS[name], label=f"{name} p95")
        if goal:
            axes.axhline(goal, color=COLOURS[name], linestyle="--", linewidth=1)
    axes.set(yscale="log")
    sparse_numbers(axes.yaxis)
    rates = axes.twinx()
    counts = np.bincount(parts, minlength=edges.size - 1)
    rates.stairs(counts / np.diff(edges), edges, color="#444444", alpha=0.8, label="requests/s")
    rates.set(ylabel="requests/s", ylim=(0, None))
    handles = [legend for source in (axes, rates) for legend in source.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper left", fontsize=8)


def _p95(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(np.percentile(known, 95)) if known.size else math.nan


def plot_cdf(axes: Any, name: str, series: dict[str, Iterable[float]]) -> None:
    """Draw cumulative distributions, one line a series, with p50 and p99; values in seconds, drawn in ms."""
    for label, values in series.items():
        ordered = np.sort(np.asarray([value for value in values if not math.isnan(value)])) * 1000
        if not ordered.size:
            continue
        share = np.arange(1, ordered.size + 1) / ordered.size
        p50, p99 = np.percentile(ordered, (50, 99))
        colour = COLOURS.get(label)
        caption = f"p50 {p50:,.1f}  p99 {p99:,.1f}"
        axes.step(
            ordered, share, where="post", color=colour, label=caption if len(series) == 1 else f"{label}: {caption}"
        )
        for quantile in (p50, p99) if len(series) == 1 else ():
            axes.axvline(quantile, color=colour, alpha=0.25, linewidth=1)
        axes.legend(loc="lower right", fontsize=8)
    axes.set(title=name, xlabel="ms", ylim=(0, 1.02))
    axes.grid(alpha=0.2)


def _plot_timeline(axes: Any, records: Sequence[RequestRecord]) -> None:
    """Draw each request as a line, pale until its first token, and the tokens a second of all requests."""
    axes.set(title="timeline", xlabel="seconds", ylabel="request")
    if not records:
        return
    origin = min(record.start for record in records)
    rows = range(len(records))
    starts, firsts, ends = _spans(records, origin)
    axes.hlines(rows, starts, firsts, color=COLOURS["TTFT"], alpha=0.35, linewidth=2, label="waiting for first token")
    axes.hlines(rows, firsts, ends, color=COLOURS["TPOT"], linewidth=1.2, label="generating")
    arrivals = np.concatenate([np.asarray(record.token_times) - origin for record in records])
    counts, edges = np.histogram(arrivals, bins=NUM_BINS, range=(0.0, float(ends.max()) or 1.0))
    rates = axes.twinx()
    rates.step(edges[:-1], counts / np.diff(edges), where="post", color="#444444", alpha=0.8, label="output events/s")
    rates.set(ylabel="output events/s", ylim=(0, None))
    handles = [legend for source in (axes, rates) for legend in source.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper left", fontsize=8)


def _spans(
    records: Sequence[RequestRecord], origin: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    starts = np.asarray([record.start for record in records]) - origin
    firsts = np.asarray([record.token_times[0] for record in records]) - origin
    ends = np.asarray([record.token_times[-1] for record in records]) - origin
    return starts, firsts, ends


def plain_numbers(axis: Any) -> None:
    """Write the numbers of a logarithmic axis without exponents."""
    for place in (axis.set_major_formatter, axis.set_minor_formatter):
        place("{x:g}")


def sparse_numbers(axis: Any) -> None:
    """The same for an axis of several decades: only 1, 2 and 5 of each have numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
