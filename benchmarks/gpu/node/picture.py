"""One picture of a run: every kernel beside its floor and its peers, decode steps beside theirs, the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {True: "#2b8a5b", False: "#c9652b", None: "#8a8a8a"}


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """From the run's JSON; what was not measured is left out."""
    figure = Figure(figsize=(14, 9), layout="constrained")
    kernels, steps, verdicts = figure.subplots(1, 3, width_ratios=(1.4, 1, 0.6))
    title = str(found.get("conditions", {}).get("device", ""))
    figure.suptitle(f"{title}, {found.get('conditions', {}).get('date', '')}")
    _kernels(kernels, found.get("kernels", ()))
    _steps(steps, found.get("engine", {}).get("decode", ()))
    _verdicts(verdicts, found.get("verdicts", ()))
    figure.savefig(path, dpi=110)


def _kernels(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title("times of kernels over their floor (dots: peers)")
    for place, row in enumerate(rows):
        floor = max(row["floor_us"], 1e-9)
        axes.barh(place, row["us"] / floor, color="#2f6fb5")
        for us in row["peers_us"].values():
            if isinstance(us, float):
                axes.plot(us / floor, place, "o", color="#c9652b", markersize=5)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['kernel']}, {row['size']}" for row in rows], fontsize=7)
    axes.invert_yaxis()


def _steps(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title("decode steps, ms")
    for how in dict.fromkeys(row["how"] for row in rows):
        mine = [row for row in rows if row["how"] == how]
        axes.plot([row["batch"] for row in mine], [row["ms"] for row in mine], "o-", label=how)
    floor = {row["batch"]: row["floor_ms"] for row in rows}
    axes.plot(list(floor), list(floor.values()), "k--", label="floor")
    axes.set_xlabel("sequences")
    axes.legend()


def _verdicts(axes: Axes, verdicts: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title("verdicts by part")
    parts = list(dict.fromkeys(one["part"] for one in verdicts))
    for place, part in enumerate(parts):
        mine, left = [one for one in verdicts if one["part"] == part], 0
        for ok in (True, False, None):
            count = sum((None if one["skipped"] else one["ok"]) is ok for one in mine)
            axes.barh(place, count, left=left, color=COLOURS[ok])
            left += count
    axes.set_yticks(range(len(parts)), parts)
    axes.invert_yaxis()
