"""`diptych plan`: the cheapest pools and flags that meet goals for a load."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.load.client import ServerError
from benchmarks.load.conditions import conditions
from benchmarks.load.report import check_writable, open_console, write_json
from benchmarks.load.trace import TraceError
from benchmarks.plan.candidate import every
from benchmarks.plan.evidence import Trial
from benchmarks.plan.options import PROG, build_parser, num_jobs, values_of
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.reach import reach
from benchmarks.plan.report import Plan, as_json, print_plan, sentences
from benchmarks.plan.search import Search
from benchmarks.plan.spec import PlanSpec, spec_of
from benchmarks.plan.stretch import Stretch
from benchmarks.plan.trials import Question, Trials
from benchmarks.plan.values import render
from benchmarks.plan.values import values_of as helm_values_of
from benchmarks.stack import StackError
from common.config.sources import exit_refused
from common.errors import ConfigError, ModelError

NOT_MET, INTERRUPTED = 1, 130
"""Exit status when no candidate meets the goals, and after Ctrl-C."""


def bar_of(console: Console, *, shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, refresh_per_second=4, disable=not shown)


def planned(spec: PlanSpec, console: Console, *, jobs: int, exhaustive: bool, progress: bool) -> Plan:
    """Search behind a progress bar, whose end is not known before. Raises ConfigError and TraceError."""
    with bar_of(console, shown=progress) as bar:
        total = len(every(spec)) * spec.search.seeds if exhaustive else None
        task = bar.add_task("formulas", total=total)

        def on_done(question: Question, trial: Trial) -> None:
            bar.advance(task)

        with Trials(spec, jobs=jobs, on_done=on_done) as trials:
            search = Search(trials, Outlook(spec), lambda text: bar.update(task, description=text))
            pick = search.exhaustive() if exhaustive else search.best()
            found = None if pick else reach(search)
        bar.update(task, total=trials.num_run, completed=trials.num_run, description="simulations")
    return Plan(search, pick, found)


def measured(options: argparse.Namespace, console: Console) -> Mapping[str, Any]:
    """Profile workers behind a progress bar. Raises ConfigError, ModelError, ServerError and StackError."""
    from benchmarks.plan.profile import ProfileOptions, profile
    from benchmarks.time_limit import time_limit

    made = ProfileOptions(
        options.profile, options.dtype, options.quantization, options.kv_memory_gib, options.profile_s
    )
    with time_limit(0.0), bar_of(console, shown=not options.no_progress) as bar:  # SIGTERM also stops the workers
        task = bar.add_task("workers start", total=round(options.profile_s))

        def advance(seconds: float, text: str) -> None:
            bar.update(task, advance=seconds, description=text)

        return profile(made, advance)


def deliver(plan: Plan, options: argparse.Namespace, argv: Sequence[str], took_s: float, console: Console) -> None:
    """Print the table and write the requested files. Raises ConfigError for values that workers would refuse."""
    spec, outlook = plan.spec, plan.outlook
    load = spec.load.trace or f"{outlook.num_requests / outlook.seconds:.3g} requests/s"
    title = f"{load}, {outlook.num_requests:,} requests in {outlook.seconds:,.0f} s, seed {spec.seed}"
    print_plan(console, plan, title=title)
    num_run = plan.search.trials.num_run
    console.print(f"{num_run:,} simulations in {took_s:,.0f} s", highlight=False)
    if options.json:
        write_json(options.json, as_json(plan, conditions(PROG, argv, took_s=took_s)))
        console.print(f"wrote {options.json}", highlight=False)
    if options.plot:
        from benchmarks.plan.plot import plot_plan  # matplotlib takes a second to import

        plot_plan(options.plot, plan, title=f"{PROG}: {title}")
        console.print(f"wrote {options.plot}", highlight=False)
    if options.values and plan.pick is None:
        console.print(f"{options.values} is not written: there is no pick", highlight=False)
    elif options.values and plan.pick is not None:
        values = helm_values_of(spec, plan.pick.candidate, options.model)
        options.values.parent.mkdir(parents=True, exist_ok=True)
        options.values.write_text(render(values, [f"Written by {PROG} for {title}.", *sentences(plan)]))
        console.print(f"wrote {options.values}", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 when no candidate meets the goals, 2 for refused input, 130 when interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    options, console = build_parser().parse_args(argv), open_console()
    try:
        check_writable(json=options.json, values=options.values)
        jobs = num_jobs(options)
        stretch = Stretch.of(spec_of(values_of(options, lambda given: measured(given, console))))
        if stretch.note:
            console.print(stretch.note, highlight=False)
        began_at, progress = time.monotonic(), not options.no_progress
        plan = planned(stretch.spec, console, jobs=jobs, exhaustive=options.exhaustive, progress=progress)
        deliver(plan, options, argv, time.monotonic() - began_at, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is planned")
        return INTERRUPTED
    except (ConfigError, ModelError, ServerError, StackError, TraceError) as error:
        exit_refused(error, PROG, {"from", *vars(options)})
    return 0 if plan.pick else NOT_MET


if __name__ == "__main__":
    raise SystemExit(main())
