"""The figures of a run: one row a format and peer, its ratios to the nearest peers, and all of them as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.compare.ratios import Cell, Load

OWN: Final = "diptych:"
COLUMNS: Final = (
    "format",
    "in the file, MB",
    "a step, MB",
    "TPOT, ms",
    "x floor",
    "prompt tok/s",
    "output tok/s",
    "MiB",
    "beside",
    "TPOT",
    "prompt",
    "output",
)


@dataclass(frozen=True, slots=True)
class Loads:
    """One stream, one long prompt, and many streams."""

    one: Load
    prompt: Load
    many: Load

    def all(self) -> tuple[Load, Load, Load]:
        return self.one, self.prompt, self.many


@dataclass(frozen=True, slots=True)
class Held:
    """The weights of an engine: bytes of the file by type, and what a decode step reads of them (0: not known)."""

    by_type: Mapping[str, int]
    step_bytes: int = 0


def figures(
    cells: Mapping[Load, Cell], loads: Loads, held: Held, memory: Sequence[float], rate: float
) -> dict[str, Any]:
    """The medians of an engine; without those of loads that did not count. `rate`: bytes read a second, or 0."""
    row: dict[str, Any] = {"file_mb": {name: round(size / 1e6, 1) for name, size in held.by_type.items()}}
    one, prompt, many = (cells[load].medians() if load in cells else {} for load in loads.all())
    if one:
        row["tpot_ms"] = round(one["TPOT mean"], 3)
        row["tpot_ms_rounds"] = [round(sample, 3) for sample in cells[loads.one].samples["TPOT mean"]]
    if prompt.get("TTFT mean"):
        row["prompt_tokens_per_s"] = round(loads.prompt.input_len / prompt["TTFT mean"] * 1000, 1)
    if many:
        row["output_tokens_per_s"] = round(many["output tok/s"], 1)
        row["output_tokens_per_s_rounds"] = [round(rate, 1) for rate in cells[loads.many].samples["output tok/s"]]
    if memory:
        row["memory_mib"] = round(statistics.median(memory), 1)
    if held.step_bytes and rate:
        row["step_mb"] = round(held.step_bytes / 1e6, 1)
        row["floor_ms"] = round(held.step_bytes / rate * 1000, 3)
    return row


SHOWN_MB: Final = 0.5
METRICS: Final = ("tpot_ms", "prompt_tokens_per_s", "output_tokens_per_s")


def beside(row: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]], peers: Sequence[str]) -> dict[str, Any]:
    """By peer that was measured, this row's figures over the peer's: a time's should be low, a rate's high.

    Of figures with rounds also the ratio of each round, if every round of both counted.
    """
    return {peer: _ratios(row, others[peer]) for peer in peers if peer in others}


def _ratios(row: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in METRICS:
        if name in row and name in other:
            found[name] = round(row[name] / other[name], 3)
        ours, theirs = (one.get(f"{name}_rounds", []) for one in (row, other))
        if ours and len(ours) == len(theirs):
            found[f"{name}_rounds"] = [round(a / b, 3) for a, b in zip(ours, theirs, strict=True)]
    return found


def cells(rows: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A line for each engine and each peer beside it, under COLUMNS."""
    lines = []
    for name, row in rows.items():
        held = ", ".join(f"{kind} {size:,.0f}" for kind, size in row["file_mb"].items() if size >= SHOWN_MB)
        over = f"{row['tpot_ms'] / row['floor_ms']:.2f}" if "tpot_ms" in row and row.get("floor_ms") else "-"
        numbers = [
            *(_number(row, "step_mb", 1), _number(row, "tpot_ms", 2), over, _number(row, "prompt_tokens_per_s", 0)),
            *(_number(row, "output_tokens_per_s", 0), _number(row, "memory_mib", 0)),
        ]
        first = [row.get("about", name), held, *numbers]
        for peer, ratios in (row.get("beside") or {"-": {}}).items():
            lines.append([*first, peer, *(_number(ratios, metric, 2) for metric in METRICS)])
            first = [""] * len(first)
    return lines


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The same as a table of a page."""
    rule = ["---"] * len(COLUMNS)
    return "\n".join(f"| {' | '.join(line)} |" for line in (COLUMNS, rule, *cells(rows)))


def _number(row: Mapping[str, Any], name: str, digits: int) -> str:
    return f"{row[name]:,.{digits}f}" if name in row else "-"
