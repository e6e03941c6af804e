"""Knobs that goals turn beside fixed flags, in virtual time: after a step in rate, a shift of the mix, a slow worker.

Each case runs with goals only, every flag at its default, and with each setting of a sweep, whose knobs stand still.
The router has the same goals and refuses by the same rules in all of them. The sweep runs on one seed, its best
settings on the others as well, and the one with the most good requests over all seeds is the best fixed setting: it is
chosen in hindsight, case by case. Workers fit their models while they serve, as in life.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.load.plot import save, sparse_numbers
from benchmarks.load.report import print_table
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.load import SimulatedRequest
from benchmarks.sla.loads import write_trace
from benchmarks.sla.step import Numbers, Settings, Skipped, Step
from benchmarks.sla.tuning_cases import END_S, EVENT_S, QUANTILE, TPOT_MS, TTFT_MS, Case, Setting, cases

WINDOW_S, LOOK_S = 5.0, 0.5
"""Arrivals of a window are judged together; by how much it slides."""
MOST_S, LEAST = 30.0, 0.95
"""The marks: seconds until the goals are met again, and goodput over the best fixed setting's."""
FINALISTS: Final = 2
"""Settings of the sweep that run on every seed."""
MOST_SEEDS: Final = 3
DRAWN_S: Final = 2.0
"""Width of the windows that are drawn."""
COLOURS: Final = ("#2f6fb5", "#2b8a5b", "#c9652b", "#7a4fa3")


def measure(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    began = time.process_time()
    found = []
    with tempfile.TemporaryDirectory(prefix="diptych-sla-") as folder:
        for case in cases(settings.traces):
            if not settings.cases or any(text in case.name for text in settings.cases):
                found.append(measured(case, settings, Path(folder), tell))
    if not found:
        raise Skipped(f"no case has one of {', '.join(settings.cases)} in its name")
    goals = {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS, "quantile": QUANTILE, "event_s": EVENT_S, "end_s": END_S}
    cpu_s = round(time.process_time() - began)
    return {"goals": goals, "cases": found, "summary": [summarised(one) for one in found], "cpu_s": cpu_s}


def measured(case: Case, settings: Settings, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Runs of one case: with goals, of the sweep, and of its finalists."""
    seeds = [settings.seed + number for number in range(min(MOST_SEEDS, settings.repeats))]
    swept = case.settings()

    def run(seed: int, setting: Setting | None) -> dict[str, Any]:
        name = f"{case.name}, seed {seed}, {setting.name if setting else 'goals'}"
        tell(name)
        found: dict[str, Any] = settings.journal.once(name, partial(one_run, case, seed, setting, folder))
        return found

    first = [run(seeds[0], setting) for setting in swept]
    order = sorted(range(len(swept)), key=lambda index: -first[index]["num_good"])[:FINALISTS]
    fixed = {swept[index].name: [first[index]] for index in order}
    goals = [run(seeds[0], None)]
    for seed in seeds[1:]:
        goals.append(run(seed, None))
        for index in order:
            fixed[swept[index].name].append(run(seed, swept[index]))
    sweep = {setting.name: row["num_good"] for setting, row in zip(swept, first, strict=True)}
    return {"case": case.name, "seeds": seeds, "goals": goals, "fixed": fixed, "sweep": sweep}


def one_run(case: Case, seed: int, setting: Setting | None, folder: Path) -> dict[str, Any]:
    """`setting`: the flags of workers whose knobs stand still; None: goals turn them."""
    file = folder / "load.jsonl"
    rows = case.rows(seed)
    write_trace(file, rows)
    simulation = Simulation(case.scenario(file, seed, setting or Setting(), fixed=setting is not None))
    knobs: dict[str, list[float]] = {}
    for look in range(int(END_S / DRAWN_S)):
        simulation.world.clock.at(look * DRAWN_S, partial(_look, simulation, knobs))
    requests = simulation.run().requests
    good = [(request.arrival_s, request.meets(TTFT_MS, TPOT_MS)) for request in requests]
    return {
        "num": len(requests),
        "num_good": sum(met for _, met in good),
        "refused": sum(request.outcome == "Overloaded" for request in requests),
        "recovery_s": recovery_s(good),
        "before": share_of(good, 0.0, EVENT_S),
        "after": share_of(good, EVENT_S + MOST_S, END_S),
        "lines": lines_of(requests) | {"knobs": knobs},
    }


def _look(simulation: Simulation, knobs: dict[str, list[float]]) -> None:
    """Note the knobs, and how many sequences run."""
    for name, worker in simulation.workers.items():
        for knob, value in worker.scheduler.knobs.items():
            if worker.pool.role == "decode" or knob == "step_tokens":
                knobs.setdefault(f"{name} {knob}", []).append(value.value)
        if worker.pool.role == "decode":
            knobs.setdefault(f"{name} running", []).append(len(worker.scheduler.running))


def share_of(good: Sequence[tuple[float, bool]], begin_s: float, end_s: float) -> float | None:
    """Of the requests that arrived in this time, the share that met both goals; None without any."""
    here = [met for at_s, met in good if begin_s <= at_s < end_s]
    return round(sum(here) / len(here), 4) if here else None


def recovery_s(good: Sequence[tuple[float, bool]]) -> float | None:
    """Seconds from the event to the end of the first window behind it whose requests meet the goals, or None.

    A window that goals were met in all along ends `WINDOW_S` after the event.
    """
    for number in range(int((END_S - EVENT_S - WINDOW_S) / LOOK_S) + 1):
        begin_s = EVENT_S + number * LOOK_S
        share = share_of(good, begin_s, begin_s + WINDOW_S)
        if share is None or share >= QUANTILE:
            return begin_s + WINDOW_S - EVENT_S
    return None


def lines_of(requests: Sequence[SimulatedRequest]) -> dict[str, Any]:
    """By the time at which requests arrived: how many did, the share within goals, p95 of both latencies in ms."""
    windows: list[list[SimulatedRequest]] = [[] for _ in range(math.ceil(END_S / DRAWN_S))]
    for request in requests:
        windows[min(len(windows) - 1, int(request.arrival_s / DRAWN_S))].append(request)
    return {
        "rate": [round(len(here) / DRAWN_S, 2) for here in windows],
        "met": [
            round(sum(each.meets(TTFT_MS, TPOT_MS) for each in here) / len(here), 4) if here else None
            for here in windows
        ],
        "ttft_p95_ms": [_p95([each.ttft_s for each in here]) for here in windows],
        "tpot_p95_ms": [_p95([each.tpot_s for each in here]) for here in windows],
    }


def _p95(seconds: Sequence[float]) -> float | None:
    known = [each for each in seconds if not math.isnan(each)]
    return round(float(np.percentile(known, 95)) * 1e3, 2) if known else None


def summarised(case: Mapping[str, Any]) -> dict[str, Any]:
    """Medians over seeds. Goals can be met again when they are with any of the settings compared."""
    best, rows = max(case["fixed"].items(), key=lambda item: sum(row["num_good"] for row in item[1]))
    goals = case["goals"]
    ratios = [ours["num_good"] / max(1, theirs["num_good"]) for ours, theirs in zip(goals, rows, strict=True)]
    ours_s, theirs_s = (_median_s([row["recovery_s"] for row in runs]) for runs in (goals, rows))
    return {
        "case": case["case"],
        "met": round(statistics.median(row["num_good"] / row["num"] for row in goals), 4),
        "best": best,
        "best_met": round(statistics.median(row["num_good"] / row["num"] for row in rows), 4),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "feasible": min(ours_s, theirs_s) < math.inf,
        "recovery_s": None if ours_s == math.inf else ours_s,
        "best_recovery_s": None if theirs_s == math.inf else theirs_s,
        "after": _median_share(goals),
        "best_after": _median_share(rows),
    }


def _median_s(seconds: Sequence[float | None]) -> float:
    return statistics.median_high(math.inf if each is None else each for each in seconds)


def _median_share(rows: Sequence[Mapping[str, Any]]) -> float:
    return round(statistics.median(row["after"] or 0.0 for row in rows), 4)


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    columns = ("case", "met", "best fixed", "met", "ratio", "range", "again in s", "fixed", "30 s later", "fixed")
    rows = [
        (
            row["case"],
            f"{row['met']:.1%}",
            row["best"],
            f"{row['best_met']:.1%}",
            f"{row['ratio']:.3f}",
            "{:.3f}-{:.3f}".format(*row["ratio_range"]),
            *(_seconds(row[name], row["feasible"]) for name in ("recovery_s", "best_recovery_s")),
            *(f"{row[name]:.1%}" for name in ("after", "best_after")),
        )
        for row in numbers["summary"]
    ]
    print_table(console, "goals only beside the best fixed setting", columns, rows, left=(0, 2))
    summary = numbers["summary"]
    as_good = sum(row["ratio"] >= LEAST for row in summary)
    possible = [row for row in summary if row["feasible"]]
    again = sum(row["recovery_s"] is not None and row["recovery_s"] <= MOST_S for row in possible)
    console.print(
        f"at least {LEAST:.0%} of the best fixed setting in {as_good} of {len(summary)} cases; within goals again in "
        f"{MOST_S:g} s in {again} of {len(possible)} that are feasible",
        highlight=False,
    )


def _seconds(seconds: float | None, feasible: bool) -> str:
    if seconds is None:
        return "never" if feasible else "infeasible"
    return f"{seconds:g}"


def draw(numbers: Mapping[str, Any], path: Path, title: str) -> None:
    found, goals = numbers["cases"], numbers["goals"]
    figure = Figure(figsize=(15, 3.0 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 3, squeeze=False, sharex=True)
    for row, case in zip(axes, found, strict=True):
        best = next(row["best"] for row in numbers["summary"] if row["case"] == case["case"])
        _draw_met(row[0], case, best, goals)
        _draw_tails(row[1], case["goals"][0]["lines"], goals)
        _draw_knobs(row[2], case["goals"][0]["lines"]["knobs"])
        for each in row:
            each.axvline(goals["event_s"], color="#444444", linewidth=1)
            each.grid(alpha=0.2)
    save(figure, path, title)


def _draw_met(axes: Any, case: Mapping[str, Any], best: str, goals: Mapping[str, float]) -> None:
    for name, runs, colour in (("goals", case["goals"], COLOURS[0]), (best, case["fixed"][best], COLOURS[2])):
        at, shares = _at(runs[0]["lines"]["met"])
        axes.plot(at, shares, color=colour, label=name)
    axes.axhline(goals["quantile"], color="#444444", linestyle="--", linewidth=1)
    axes.set(title=f"{case['case']}: share within goals", ylim=(0, 1.03))
    axes.legend(loc="lower left", fontsize=7)


def _draw_tails(axes: Any, lines: Mapping[str, Any], goals: Mapping[str, float]) -> None:
    for name, colour in zip(("ttft", "tpot"), COLOURS, strict=False):
        axes.plot(*_at(lines[f"{name}_p95_ms"]), color=colour, label=f"{name.upper()} p95")
        axes.axhline(goals[f"{name}_ms"], color=colour, linestyle="--", linewidth=1)
    axes.set(title="tails beside the goals, ms", yscale="log")
    sparse_numbers(axes.yaxis)
    axes.legend(loc="lower left", fontsize=7)


def _draw_knobs(axes: Any, knobs: Mapping[str, Sequence[float]]) -> None:
    worker = "decode-0"
    for colour, knob in zip(COLOURS, ("batch_cap", "running", "step_tokens"), strict=False):
        axes.step(*_at(knobs[f"{worker} {knob}"]), where="post", color=colour, label=f"{worker} {knob}")
    if (prefill := knobs.get("prefill-0 step_tokens")) is not None:
        axes.step(*_at(prefill), where="post", color=COLOURS[3], label="prefill-0 step_tokens")
    axes.set(title="knobs", yscale="symlog")
    sparse_numbers(axes.yaxis)
    axes.legend(loc="lower left", fontsize=7)


def _at(values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    at = [number * DRAWN_S for number in range(len(values))]
    return at, [math.nan if value is None else value for value in values]


STEP: Final = Step("tuning", "knobs that goals turn beside the best fixed flags, in virtual time", measure, show, draw)
