"""How well goals are met, and at what cost: every table and plot of docs/guides/goals.md in one command.

    python -m benchmarks.sla --traces FOLDER

Each step writes `sla-STEP-DATE.json` and `.png` into the folder of results. A step that cannot run here says why, and
the others go on. All run in virtual time, a core each; they keep what they have so far in
`sla-STEP.partial.jsonl`: `--resume` goes on there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.status import Status

from benchmarks.load.conditions import conditions
from benchmarks.load.report import open_console, write_json
from benchmarks.load.trace import TraceError
from benchmarks.script import run
from benchmarks.sla import planner, policies, tuning
from benchmarks.sla.journal import Journal
from benchmarks.sla.side_by_side import SideBySide
from benchmarks.sla.step import Settings, Skipped, Step
from common.arguments import CommandParser, number

PROGRAM: Final = "python -m benchmarks.sla"
STEPS: Final[tuple[Step, ...]] = (policies.STEP, planner.STEP, tuning.STEP)
RESULTS: Final = Path(__file__).parent.parent / "results"


def parse(argv: Sequence[str]) -> Namespace:
    parser = CommandParser(PROGRAM, description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    usual, names = Settings(), [step.name for step in STEPS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="STEP", help="steps to run: " + ", ".join(names)
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="folder with azure2023_conv.csv.gz, azure2023_code.csv.gz and mooncake_conversation.jsonl.gz; "
        "without it, loads are synthetic",
    )
    parser.add_argument(
        "--begin",
        type=number(0, 0.99),
        default=usual.begin,
        metavar="SHARE",
        help="share at the start of each trace that the step policies skips; results are named sla-STEP-later",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="folder for the results")
    parser.add_argument(
        "--repeats", type=number(1, whole=True), default=usual.repeats, help="runs per policy, with different requests"
    )
    parser.add_argument(
        "--num-requests", type=number(20, whole=True), default=usual.num_requests, help="requests per run of a policy"
    )
    parser.add_argument(
        "--seconds", type=number(120), default=usual.seconds, help="virtual time per planner load in seconds"
    )
    parser.add_argument("--seed", type=int, default=usual.seed, help="random seed of arrivals, lengths and noise")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="parts of the names of the cases of tuning and the loads of policies to run",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the results of an interrupted run with the same settings"
    )
    parser.add_argument("--redraw", type=Path, nargs="+", metavar="JSON", help="only redraw the plots of these results")
    return parser.parse_args(argv)


def settings_of(options: Namespace, step: Step) -> Settings:
    settings = Settings(
        traces=options.traces,
        begin=options.begin,
        repeats=options.repeats,
        num_requests=options.num_requests,
        seconds=options.seconds,
        seed=options.seed,
        cases=tuple(options.cases),
    )
    file = options.results / f"sla-{step.name}.partial.jsonl"
    # Settings that no simulation reads may differ.
    traces = None if settings.traces is None else Path(".")
    same = replace(settings, traces=traces, cases=())
    return replace(settings, journal=Journal(file, repr(same), resume=options.resume))


def title_of(step: Step, found: dict[str, Any]) -> str:
    """What a plot says of its conditions."""
    load = "load average {} to {}".format(*found["load_averages"])
    return f"{step.about} ({found['date'][:10]}, {found['cpu']}, {found['cores']} cores, {load})"


def run_step(
    step: Step, settings: Settings, beside: SideBySide, options: Namespace, console: Console, argv: Sequence[str]
) -> None:
    """Measure, print, write and draw one step. Raises Skipped, TraceError."""
    before, began = os.getloadavg()[0], time.monotonic()
    with Status(step.about, console=console) as status:

        def tell(words: str) -> None:
            status.update(words)
            if not console.is_terminal:
                console.print(f"  {time.monotonic() - began:5.0f} s  {words}", highlight=False)

        if step.name in beside:
            numbers, took_s = beside.result(step.name, tell)
        else:
            numbers = step.measure(settings, lambda words: tell(f"{step.name}: {words}"))
            took_s = time.monotonic() - began
    found = conditions(PROGRAM, argv, took_s=round(took_s))
    found["load_averages"] = [round(before, 1), round(os.getloadavg()[0], 1)]
    step.show(console, numbers)
    name = f"sla-{step.name}{'-later' if settings.begin else ''}-{datetime.now(UTC):%Y-%m-%d}"
    write_json(options.results / f"{name}.json", {"step": step.name, "conditions": found, **numbers})
    step.draw(numbers, options.results / f"{name}.png", title_of(step, found))
    console.print(f"wrote {options.results / name}.json and .png after {found['took_s']} s", highlight=False)


def redraw(files: Sequence[Path], console: Console) -> None:
    """Print and draw results again."""
    by_name = {step.name: step for step in STEPS}
    for file in files:
        numbers = json.loads(file.read_text(encoding="utf-8"))
        step = by_name[numbers["step"]]
        step.show(console, numbers)
        step.draw(numbers, file.with_suffix(".png"), title_of(step, numbers["conditions"]))
        console.print(f"drew {file.with_suffix('.png')}", highlight=False)


def main(argv: Sequence[str]) -> int:
    """Exit status 0, or 1 when a step failed; one that was skipped has not failed."""
    options, console = parse(argv), open_console()
    if options.redraw:
        redraw(options.redraw, console)
        return 0
    chosen = {step: settings_of(options, step) for step in STEPS if step.name in options.only}
    num_failed = 0
    with SideBySide(chosen if len(chosen) > 1 else {}, os.cpu_count() or 1) as beside:
        for number, (step, settings) in enumerate(chosen.items(), 1):
            console.print(f"[{number}/{len(chosen)}] {step.name}: {step.about}", markup=False, highlight=False)
            try:
                if len(settings.journal):
                    console.print(f"  {len(settings.journal)} parts are known", highlight=False)
                run_step(step, settings, beside, options, console, argv)
                settings.journal.remove()
            except Skipped as why:
                settings.journal.remove()
                console.print(f"skipped {step.name}: {why}", markup=False, highlight=False)
            except TraceError as error:
                num_failed += 1
                print(f"{PROGRAM}: {step.name} failed: {error}", file=sys.stderr)
    return 1 if num_failed else 0


if __name__ == "__main__":
    run(main)
