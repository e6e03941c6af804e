"""Real against simulated distributions: draws what `python -m benchmarks.reality` found.

That command starts paced clusters and takes minutes; `--reality FILE` gives its result instead.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.load.plot import save
from benchmarks.load.report import print_table
from benchmarks.reality.numbers import GOODPUT_MARK, MARK
from benchmarks.sla.step import Numbers, Settings, Skipped, Step

MODULE: Final = "benchmarks.reality"
MOST_S: Final = 600.0
LATENCIES: Final = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
QUANTILES: Final = (50, 90, 99)
JUDGED: Final = (50, 99)
MOST_DRAWN: Final = 6


def measure(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    """Raises Skipped where neither the command nor its result is there."""
    if settings.reality is not None:
        return read(settings.reality)
    if importlib.util.find_spec(MODULE) is None:
        raise Skipped(f"{MODULE} is not part of this installation; give its result with --reality FILE")
    if settings.traces is None:
        raise Skipped(f"{MODULE} replays traces; name their folder with --traces")
    with tempfile.TemporaryDirectory(prefix="diptych-sla-") as folder:
        file = Path(folder) / "reality.json"
        tell(f"{MODULE} starts clusters")
        command = [sys.executable, "-P", "-m", MODULE, "--traces", str(settings.traces), "--output", str(file)]
        command += ["--begin", f"{settings.begin:g}"]
        try:
            done = subprocess.run(command, timeout=MOST_S, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired as error:
            raise Skipped(f"{MODULE} took more than {MOST_S:g} s; run it alone, and give --reality FILE") from error
        if done.returncode or not file.exists():
            raise Skipped(f"{MODULE} ended with status {done.returncode}: {done.stderr.strip()[-400:]}")
        return read(file)


def read(file: Path) -> Numbers:
    """Distributions of each run in its result. Raises Skipped for a file that is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        columns = {name: list(content["fields"]).index(attribute) for name, attribute in LATENCIES}
        return {"runs": [_run(run, columns) for run in content["runs"]], "source": content.get("conditions", {})}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise Skipped(f"{file} is no result of {MODULE}: {error!r}") from error


def _run(run: Mapping[str, Any], columns: Mapping[str, int]) -> dict[str, Any]:
    series = {"real": run["real"]["requests"]} | {name: each["requests"] for name, each in run["simulated"].items()}
    return {
        "name": " ".join((run["case"], run["load"], run["policy"])),
        "fitted_on": bool(run["fitted_on"]),
        "load_average": run["load_average"],
        "goodput": {"real": run["real"]["numbers"]["goodput"]}
        | {name: each["numbers"]["goodput"] for name, each in run["simulated"].items()},
        "ms": {
            source: {name: _values(rows, column) for name, column in columns.items()} for source, rows in series.items()
        },
    }


def _values(rows: Sequence[Sequence[Any]], column: int) -> list[float]:
    return sorted(round(row[column] * 1e3, 3) for row in rows if row[column] is not None)


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    names = [f"{name} p{q}" for name, _ in LATENCIES for q in QUANTILES]
    rows = []
    for run in numbers["runs"]:
        for source, found in run["ms"].items():
            cells = [
                f"{np.percentile(found[name], q):,.1f}" if found[name] else "-"
                for name, _ in LATENCIES
                for q in QUANTILES
            ]
            good = run.get("goodput", {}).get(source)  # results before 2026-11-25 have none
            cells.append("-" if good is None else f"{good:.2f}")
            rows.append((run["name"] if source == "real" else "", source, *cells))
    print_table(console, "real against simulated, ms", ("run", "", *names, "goodput /s"), rows, left=(0, 1))
    for line in verdicts(numbers["runs"]):
        console.print(line, highlight=False)


def verdicts(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many values of simulations are as near to the real ones as the marks ask, by source of coefficients."""
    lines = []
    for source in dict.fromkeys(name for run in runs for name in run["ms"] if name != "real"):
        found = [run for run in runs if source in run["ms"]]
        tails = [
            abs(np.percentile(run["ms"][source][name], q) / np.percentile(run["ms"]["real"][name], q) - 1) <= MARK
            for run in found
            for name, _ in LATENCIES
            for q in JUDGED
            if run["ms"][source][name] and run["ms"]["real"][name]
        ]
        goodputs = [(run["goodput"][source], run["goodput"]["real"]) for run in found if "goodput" in run]
        good = [abs(simulated / max(1e-9, real) - 1) <= GOODPUT_MARK for simulated, real in goodputs]
        lines.append(
            f"{source}: {sum(tails)} of {len(tails)} p50 and p99 within {MARK:.0%}, "
            f"{sum(good)} of {len(good)} goodputs within {GOODPUT_MARK:.0%}"
        )
    return lines


def draw(numbers: Mapping[str, Any], path: Path, title: str) -> None:
    runs = numbers["runs"][:MOST_DRAWN]
    figure = Figure(figsize=(10, 3.4 * len(runs)), layout="constrained")
    for row, run in enumerate(runs):
        for column, (name, _) in enumerate(LATENCIES):
            axes = figure.add_subplot(len(runs), 2, 2 * row + column + 1)
            for source, found in run["ms"].items():
                values = np.asarray(found[name])
                shares = np.arange(1, values.size + 1) / max(1, values.size)
                axes.step(values, shares, where="post", label=source, linewidth=2 if source == "real" else 1.2)
            axes.set(title=f"{run['name']}: {name}", xlabel="ms", ylim=(0, 1.02))
            axes.grid(alpha=0.2)
            axes.legend(loc="lower right", fontsize=8)
    save(figure, path, title)


STEP: Final = Step("reality", "real against simulated distributions", measure, show, draw)
