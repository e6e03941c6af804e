"""The figures of a run as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.compare.formats.table import OWN
from benchmarks.load.plot import save

PANELS: Final = {
    "tpot_ms": "ms a token, one stream (line: floor)",
    "prompt_tokens_per_s": "prompt tokens/s",
    "output_tokens_per_s": "output tokens/s, many streams",
    "memory_mib": "memory, MiB",
}
OURS, THEIRS = "#2f6fb5", "#c9652b"


def plot(path: Path, rows: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Draw a panel for each figure, a bar for each engine: ours blue, those of peers orange."""
    figure = Figure(figsize=(15, 1.5 + 0.3 * len(rows)), layout="constrained")
    names = list(rows)
    colours = [OURS if name.startswith(OWN) else THEIRS for name in names]
    for axes, (metric, label) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        axes.barh(range(len(names)), [rows[name].get(metric, 0.0) for name in names], color=colours)
        for place, name in enumerate(names):
            if metric == "tpot_ms" and "floor_ms" in rows[name]:
                axes.vlines(rows[name]["floor_ms"], place - 0.45, place + 0.45, color="#111111")
        axes.set(xlabel=label)
        axes.grid(alpha=0.2, axis="x")
        axes.set_yticks(range(len(names)), [name.removeprefix(OWN) for name in names])
    figure.axes[0].invert_yaxis()
    save(figure, path, title)
