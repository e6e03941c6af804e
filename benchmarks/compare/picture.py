"""A comparison as tables for a terminal and as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.console import Console
from rich.table import Table

from benchmarks.compare.ratios import METRICS
from benchmarks.load.plot import plain_numbers, save

PANELS = ("output tok/s", "TTFT p50", "ITL p99")
OWN_COLOURS = ("#2f6fb5", "#12365f", "#6ea3da", "#0b7a75")
PEER_COLOURS = ("#c9652b", "#7a4fa3", "#2b8a5b", "#b8a02c", "#8c8c8c", "#b04a6a", "#5c4433", "#d9a6c9", "#1f1f1f")


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each load: every engine's medians, then the ratios of our medians to each peer's."""
    for row in rows:
        table = Table(title=f"{row['load']} (latencies in ms; a rate's ratio should be high, a latency's low)")
        table.title_justify = "left"
        table.add_column("")
        for metric in METRICS:
            table.add_column(metric.name, justify="right")
        for name, engine in row["engines"].items():
            table.add_row(name, *_cells(engine["medians"], "{:,.1f}"))
        table.add_section()
        for pair, ratios in row["ratios"].items():
            table.add_row(pair, *_cells(ratios, "{:.2f}x"))
        console.print(table)
        for name, engine in row["engines"].items():
            for problem in engine["problems"]:
                console.print(f"{name}: not counted: {problem[:200]}", highlight=False, markup=False)


def _cells(numbers: dict[str, float], form: str) -> list[str]:
    return [form.format(numbers[metric.name]) if metric.name in numbers else "-" for metric in METRICS]


def plot(path: Path, rows: Sequence[dict[str, Any]], own: Sequence[str], title: str) -> None:
    """Draw a panel for each metric: loads side by side, each engine's median and the range of its samples.

    A rate is a bar, a latency a point on a logarithmic axis.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["engines"]))
    colours = _colours(names, own)
    figure = Figure(figsize=(max(8.0, 1.1 * len(rows) + 0.22 * len(rows) * len(names)), 9), layout="constrained")
    for axes, metric in zip(figure.subplots(len(PANELS), 1, squeeze=False)[:, 0], PANELS, strict=True):
        width, rate = 0.8 / max(1, len(names)), metric.endswith("/s")
        for at, name in enumerate(names):
            for place, row in enumerate(rows):
                engine = row["engines"].get(name, {"medians": {}, "samples": {}})
                if metric not in engine["medians"]:
                    continue
                x = place - 0.4 + width * (at + 0.5)
                median, samples = engine["medians"][metric], engine["samples"][metric]
                if rate:
                    axes.bar(x, median, width * 0.92, color=colours[name])
                else:
                    axes.plot(x, median, "o", color=colours[name])
                axes.vlines(x, min(samples), max(samples), color="#222222" if rate else colours[name], linewidth=1)
        axes.set_xticks(range(len(rows)), [row["load"] for row in rows])
        axes.set(ylabel=metric if rate else f"{metric}, ms (log)", yscale="linear" if rate else "log")
        axes.set_xlim(-0.5, len(rows) - 0.5)
        if not rate:
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            plain_numbers(axes.yaxis)
        axes.grid(alpha=0.2, axis="y", which="both")
    handles = [axes.bar(0, 0, color=colours[name], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(names)), fontsize=8)
    save(figure, path, title)


def _colours(names: Sequence[str], own: Sequence[str]) -> dict[str, str]:
    """Blues for ours, other colours for peers."""
    ours, theirs = [name for name in names if name in own], [name for name in names if name not in own]
    return {
        **{name: OWN_COLOURS[i % len(OWN_COLOURS)] for i, name in enumerate(ours)},
        **{name: PEER_COLOURS[i % len(PEER_COLOURS)] for i, name in enumerate(theirs)},
    }
