"""Draws a plan: what each simulated candidate costs, and how many requests meet the goals."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.load.plot import save
from benchmarks.plan.report import Plan

TWO_POOLS, ONE_POOL, PICKED = "#2f6fb5", "#c9652b", "#2b8a5b"
LOWEST = 0.3
"""Attainments below are left out: they would press the others together."""
MOST_NAMES = 14


def plot_plan(path: Path, plan: Plan, *, title: str) -> None:
    """Draw cost an hour against attainment with its interval, as a PNG."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.add_subplot()
    quantile = plan.spec.goals.quantile
    shown = [one for one in plan.search.ranked() if one.attainment >= LOWEST] or plan.search.ranked()
    for is_one, colour, label in ((False, TWO_POOLS, "two pools"), (True, ONE_POOL, "one pool")):
        group = [one for one in shown if one.candidate.is_one_pool == is_one]
        if not group:
            continue
        below = [max(0.0, one.attainment - one.interval[0]) for one in group]
        above = [max(0.0, one.interval[1] - one.attainment) for one in group]
        axes.errorbar(
            [one.candidate.cost(plan.spec) for one in group],
            [one.attainment for one in group],
            yerr=[below, above],
            fmt="o",
            color=colour,
            label=label,
            capsize=3,
            alpha=0.8,
        )
    by_shape = {one.candidate.shape: one for one in reversed(shown)}  # the best of each
    for one in list(by_shape.values())[-MOST_NAMES:]:
        place = (one.candidate.cost(plan.spec), one.attainment)
        axes.annotate(one.candidate.shape, place, xytext=(6, -10), textcoords="offset points", fontsize=8)
    if plan.pick is not None:
        picked = (plan.pick.candidate.cost(plan.spec), plan.pick.attainment)
        axes.plot(*([value] for value in picked), "o", color=PICKED, markersize=14, fillstyle="none", label="pick")
    axes.axhline(quantile, color="#888888", linewidth=1, linestyle="--", label=f"goal: {quantile:.0%}")
    axes.set(xlabel="cost of an hour", ylabel="share of requests that met the goals", xlim=(0, None))
    axes.grid(alpha=0.2)
    axes.legend(loc="lower right")
    save(figure, path, title)
