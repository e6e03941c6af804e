"""Loads, the metrics of a run, medians over rounds, and the ratios of one engine to another."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.summary import Summary

LENGTHS = re.compile(r"(\d+)/(\d+)")
OPEN_LOOP = re.compile(r"(\d+)/(\d+)@(\d*\.?\d+)")


@dataclass(frozen=True)
class Load:
    """Tokens in and out, and either `concurrency` users, each of which sends its next request after the last answer, or
    requests that arrive at random, `rate` a second."""

    input_len: int
    output_len: int
    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        load = f"{self.rate:g}/s" if self.rate else f"c={self.concurrency}"
        return f"{self.input_len}/{self.output_len} {load}"


def parse_loads(workloads: str, concurrency: str, open_loop: str) -> list[Load]:
    """`128/128,512/64` crossed with `1,8`, then `512/64@0.4` for 0.4 requests a second. Raises ValueError."""
    loads = [
        Load(*_lengths(pair), concurrency=_positive(users))
        for pair in _items(workloads)
        for users in _items(concurrency)
    ]
    for item in _items(open_loop):
        found = OPEN_LOOP.fullmatch(item)
        if found is None or not float(found[3]):
            raise ValueError(f"{item!r} is not INPUT/OUTPUT@RATE, such as 512/64@0.4")
        loads.append(Load(*_lengths(f"{found[1]}/{found[2]}"), rate=float(found[3])))
    if not loads:
        raise ValueError("no load: name a workload and a concurrency, or an open loop")
    return loads


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _lengths(text: str) -> tuple[int, int]:
    found = LENGTHS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not INPUT/OUTPUT in tokens, such as 128/128")
    return _positive(found[1]), _positive(found[2])


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise ValueError(f"{text!r} is not a whole number above 0")
    return int(text)


@dataclass(frozen=True)
class Metric:
    """A number of a run. `higher`: more of it is better."""

    name: str
    of: Callable[[Summary], float]
    higher: bool = False


METRICS = (
    Metric("output tok/s", lambda summary: summary.output_tokens_per_s, higher=True),
    Metric("prompt tok/s", lambda summary: summary.input_tokens_per_s, higher=True),
    Metric("requests/s in goals", lambda summary: summary.goodput, higher=True),
    Metric("TTFT mean", lambda summary: summary.ttft_ms.mean),
    Metric("TTFT p50", lambda summary: summary.ttft_ms.p50),
    Metric("TTFT p99", lambda summary: summary.ttft_ms.p99),
    Metric("TPOT mean", lambda summary: summary.tpot_ms.mean),
    Metric("ITL p99", lambda summary: summary.itl_ms.p99),
)


@dataclass
class Cell:
    """All runs of one engine under one load: each metric's samples, and problems."""

    samples: dict[str, list[float]] = field(default_factory=lambda: {metric.name: [] for metric in METRICS})
    problems: list[str] = field(default_factory=list)

    def add(self, load: Load, summary: Summary) -> None:
        """Add a run as samples, or as a problem if some requests did not do the requested work."""
        problem = find_problem(load, summary)
        if problem:
            self.problems.append(problem)
            return
        for metric in METRICS:
            self.samples[metric.name].append(metric.of(summary))

    def medians(self) -> dict[str, float]:
        """The medians of the metrics that have samples."""
        return {name: statistics.median(values) for name, values in self.samples.items() if values}


def find_problem(load: Load, summary: Summary) -> str:
    """The reason why a run does not count under `load`, or ""."""
    if not summary.num_ok or summary.num_ok < summary.num_requests:
        reason = next(iter(summary.messages.values()), "")
        return f"{summary.num_requests - summary.num_ok} of {summary.num_requests} requests failed: {reason}"
    for what, tokens, length in (
        ("prompt", summary.input_tokens, load.input_len),
        ("output", summary.output_tokens, load.output_len),
    ):
        if tokens != summary.num_ok * length:
            return f"{tokens / summary.num_ok:g} {what} tokens a request instead of {length}"
    if summary.cached_tokens:
        return f"{summary.cached_tokens} prompt tokens came from a cache"
    return ""


Results = Mapping[str, Mapping[Load, Cell]]


def ratios(ours: Cell, theirs: Cell) -> dict[str, float]:
    """Our median over theirs, for each metric that both have."""
    other = theirs.medians()
    return {name: value / other[name] for name, value in ours.medians().items() if other.get(name)}


def rows(results: Results, own: Sequence[str], peers: Sequence[str]) -> list[dict[str, Any]]:
    """One row a load: medians and samples by engine, and the ratio of each of our variants to each peer."""
    loads = list(dict.fromkeys(load for cells in results.values() for load in cells))
    shown = []
    for load in loads:
        cells = {name: by_load[load] for name, by_load in results.items() if load in by_load}
        shown.append(
            {
                "load": str(load),
                "engines": {name: _describe(cell) for name, cell in cells.items()},
                "ratios": {
                    f"{ours} / {theirs}": _rounded(ratios(cells[ours], cells[theirs]))
                    for ours in own
                    for theirs in peers
                    if ours in cells and theirs in cells
                },
            }
        )
    return shown


def _describe(cell: Cell) -> dict[str, Any]:
    samples = {name: [round(value, 3) for value in values] for name, values in cell.samples.items() if values}
    return {"medians": _rounded(cell.medians()), "samples": samples, "problems": cell.problems}


def _rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in numbers.items()}
