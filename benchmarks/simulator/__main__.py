"""`diptych simulate`: what a scenario would do, in virtual time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.load.conditions import conditions
from benchmarks.load.report import check_writable, open_console, write_json
from benchmarks.load.trace import TraceError
from benchmarks.simulator.options import PROG, build_parser
from benchmarks.simulator.report import Findings, as_json, print_findings
from benchmarks.simulator.simulation import Run, Simulation
from benchmarks.simulator.world.scenario import Scenario, read_scenario
from common.config.sources import exit_refused
from common.errors import ConfigError


def simulated(scenario: Scenario, console: Console, *, progress: bool) -> Run:
    """Run one scenario behind a progress bar."""
    simulation = Simulation(scenario)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]:,.0f} s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4, disable=not progress) as shown:
        bar = shown.add_task(scenario.policy, total=simulation.num_requests, now=0.0)
        run = simulation.run(lambda num_over, now: shown.update(bar, completed=num_over, now=now))
        shown.update(bar, completed=simulation.num_requests, now=run.seconds)
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 for a refused scenario."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args(argv)
    console = open_console()
    try:
        check_writable(json=arguments.json)
        scenario = read_scenario(arguments.scenario)
        if arguments.seed >= 0:
            scenario = scenario.changed(seed=arguments.seed)
        policies = arguments.policy.split(",") if arguments.policy else []
        scenarios = [scenario.changed(policy=policy) for policy in policies] or [scenario]
        began_at = time.monotonic()
        first_runs = [simulated(one, console, progress=not arguments.no_progress) for one in scenarios]
    except (ConfigError, TraceError) as error:
        exit_refused(error, PROG, vars(arguments))
    took_s = time.monotonic() - began_at
    runs = [run for first in first_runs for run in (first, *first.others)]
    findings = [Findings.of(run) for run in runs]
    print_findings(console, findings, title=f"{arguments.scenario.name}, seed {scenario.seed}")
    num_events = sum(run.num_events for run in first_runs)
    console.print(f"{num_events:,} events in {took_s:,.1f} s", highlight=False)
    if arguments.json:
        write_json(arguments.json, as_json(runs, findings, conditions(PROG, argv, took_s=took_s)))
        console.print(f"wrote {arguments.json}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
