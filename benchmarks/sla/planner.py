"""Pools under the planner over time, and cost against attainment beside rival rules, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.load.plot import save, sparse_numbers
from benchmarks.load.report import print_table
from benchmarks.planner import __main__ as planner
from benchmarks.planner.loads import BOUNDS, GOALS, Load, loads
from benchmarks.planner.world import CONTROL_S, Request, Result, World
from benchmarks.sla.step import Numbers, Settings, Step

OURS, BEST = "planner", "clairvoyant"
WINDOW_S: Final = 30.0
SHOWN: Final = "sine 5-45/s"
"""The load whose time lines are drawn."""
MOST_COST, LEAST_MET = 1.2, 0.95
MARKERS: Final = ("o", "s", "^", "D", "v", "P")
COLUMNS: Final = ("load", "controller", "goals met", "refused", "prefill s", "decode s", "cost", "changes", "turns")


def measure(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    rows: list[dict[str, Any]] = []
    lines: dict[str, Any] = {}
    for load in loads(settings.seconds):
        found = settings.journal.once(load.name, partial(_of_load, load, settings, tell))
        rows += found["rows"]
        lines = found["lines"] or lines
    goals = {
        "ttft_ms": GOALS.ttft_s * 1e3,
        "tpot_ms": GOALS.tpot_s * 1e3,
        "quantile": GOALS.quantile,
    }
    return {"rows": rows, "lines": lines, "goals": goals}


def _of_load(load: Load, settings: Settings, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every controller under one load, the clairvoyant first."""
    rows: list[dict[str, Any]] = []
    lines: dict[str, Any] = {}
    best = 0.0
    for name, world, result in planner.measure(load, settings.seed):
        tell(f"{load.name}, {name}")
        best = best or result.cost
        rows.append(planner.row_of(load, name, result, best))
        if load.name == SHOWN and name == OURS:
            lines = lines_of(world, result, settings.seconds)
    return {"rows": rows, "lines": lines}


def lines_of(world: World, result: Result, seconds: float) -> dict[str, Any]:
    """By windows of arrivals: those that arrived and were served a second, and p95 in ms; workers at each look."""
    windows: list[list[Request]] = [[] for _ in range(math.ceil(seconds / WINDOW_S))]
    for request in world.all:
        windows[int(request.arrived_at / WINDOW_S)].append(request)
    served = [[one for one in window if math.isfinite(one.ttft_s)] for window in windows]
    return {
        "window_s": WINDOW_S,
        "rate": [round(len(window) / WINDOW_S, 2) for window in windows],
        "served": [round(len(here) / WINDOW_S, 2) for here in served],
        "ttft_p95_ms": [_p95([one.ttft_s for one in here]) for here in served],
        "tpot_p95_ms": [_p95([one.tpot_s for one in here if one.tpot_s]) for here in served],
        "look_s": CONTROL_S,
        "ready": {role: [nums[role] for nums in result.ready] for role in BOUNDS},
        "wanted": {role: [nums[role] for nums in result.history] for role in BOUNDS},
    }


def _p95(seconds: Sequence[float]) -> float | None:
    return round(float(np.percentile(seconds, 95)) * 1e3, 2) if seconds else None


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    rows = [
        (
            row["load"],
            row["controller"],
            f"{row['met']:.1%}",
            f"{row['refused']:.1%}",
            *(f"{row[name]:,}" for name in ("prefill_s", "decode_s")),
            f"{row['over_clairvoyant']:.2f}",
            *(f"{row[name]}" for name in ("changes", "turns")),
        )
        for row in numbers["rows"]
    ]
    print_table(console, "pools under a controller", COLUMNS, rows, left=(0, 1))
    ours = [row for row in numbers["rows"] if row["controller"] == OURS]
    reached = [row["load"] for row in ours if row["met"] >= LEAST_MET and row["over_clairvoyant"] <= MOST_COST]
    told = f"the planner met {LEAST_MET:.0%} at no more than {MOST_COST} times the clairvoyant's cost"
    console.print(f"{told} on {len(reached)} of {len(ours)} loads", highlight=False)


def draw(numbers: Mapping[str, Any], path: Path, title: str) -> None:
    figure = Figure(figsize=(13, 11), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=(1, 1, 1.2))
    lines, goals = numbers["lines"], numbers["goals"]
    if lines:
        _draw_pools(figure.add_subplot(grid[0]), lines)
        _draw_tails(figure.add_subplot(grid[1]), lines, goals)
    _draw_costs(figure.add_subplot(grid[2]), numbers["rows"], goals["quantile"])
    save(figure, path, title)


def _draw_pools(axes: Any, lines: Mapping[str, Any]) -> None:
    looks = np.arange(1, len(lines["ready"]["decode"]) + 1) * lines["look_s"]
    for role, colour in (("prefill", "#2f6fb5"), ("decode", "#2b8a5b")):
        axes.step(looks, lines["ready"][role], where="post", color=colour, label=f"{role} workers that serve")
        axes.step(
            looks, lines["wanted"][role], where="post", color=colour, alpha=0.4, linewidth=1, label=f"{role} wanted"
        )
    axes.set(title=f"{SHOWN}: load and workers", ylabel="workers", ylim=(0, None))
    rates = axes.twinx()
    rates.plot(_middles(lines), lines["rate"], color="#444444", alpha=0.7, label="requests/s")
    rates.set(ylabel="requests/s", ylim=(0, None))
    handles = [legend for source in (axes, rates) for legend in source.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper right", fontsize=8)


def _draw_tails(axes: Any, lines: Mapping[str, Any], goals: Mapping[str, float]) -> None:
    for name, colour in (("ttft", "#2f6fb5"), ("tpot", "#2b8a5b")):
        values = [math.nan if value is None else value for value in lines[f"{name}_p95_ms"]]
        axes.plot(_middles(lines), values, color=colour, label=f"{name.upper()} p95")
        axes.axhline(goals[f"{name}_ms"], color=colour, linestyle="--", linewidth=1, label="goal")
    axes.set(title="tails beside the goals", xlabel="seconds", ylabel="ms", yscale="log")
    sparse_numbers(axes.yaxis)
    axes.legend(loc="upper right", fontsize=8, ncols=2)


def _middles(lines: Mapping[str, Any]) -> list[float]:
    return [(number + 0.5) * lines["window_s"] for number in range(len(lines["rate"]))]


def _draw_costs(axes: Any, rows: Sequence[Mapping[str, Any]], goal: float) -> None:
    names = list(dict.fromkeys(row["controller"] for row in rows))
    loads = list(dict.fromkeys(row["load"] for row in rows))
    for colour, name in enumerate(names):
        for marker, load in zip(MARKERS, loads, strict=False):
            points = [row for row in rows if (row["controller"], row["load"]) == (name, load)]
            axes.plot(
                [row["over_clairvoyant"] for row in points],
                [row["met"] for row in points],
                marker,
                color=f"C{colour}",
                markersize=9 if name == OURS else 7,
                label=name if load == loads[0] else None,
            )
    for marker, load in zip(MARKERS, loads, strict=False):
        axes.plot([], [], marker, color="#888888", label=load)
    axes.axhline(goal, color="#444444", linestyle="--", linewidth=1)
    axes.set(title="cost against attainment", ylabel="requests within goals")
    axes.set(xlabel="worker-seconds over the clairvoyant's")
    axes.grid(alpha=0.2)
    axes.legend(loc="lower right", fontsize=8, ncols=2)


STEP: Final = Step("planner", "pools under the planner and rival rules, in virtual time", measure, show, draw)
