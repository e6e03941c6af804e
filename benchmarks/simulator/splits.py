"""What each fixed split of a scenario's workers brings, beside the scenario itself, whose workers may change roles.

    python -m benchmarks.simulator.splits benchmarks/data/alternating.toml --stretch 1 3 7.5

The scenario has one pool of each role. Goodput counts requests that met both goals, over the time of arrivals.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from msgspec.structs import replace

from benchmarks.load.conditions import conditions
from benchmarks.load.report import open_console, print_table, write_json
from benchmarks.simulator.report import Findings
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.scenario import Scenario, read_scenario
from common.config.sources import exit_refused
from common.errors import ConfigError

PROGRAM = "python -m benchmarks.simulator.splits"
COLUMNS = ("split", "goodput /s", "met by part", "refused", "failed", "TTFT p90", "TPOT p90", "role changes")


def stretched(scenario: Scenario, factor: float) -> Scenario:
    """The scenario with parts of its load that last `factor` times as long, at the same rates."""
    load = scenario.load
    parts = tuple(replace(part, begin_s=factor * part.begin_s, end_s=factor * part.end_s) for part in load.parts)
    longer = replace(load, parts=parts, period_s=factor * load.period_s)
    return replace(scenario, load=longer, duration_s=factor * scenario.duration_s)


def splits(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Each split of all workers with its name, roles pinned, and at last the scenario as it is."""
    roles = [pool.role for pool in scenario.pool]
    if sorted(roles) != ["decode", "prefill"]:
        raise ConfigError("pool.role", roles, "one pool of each role")
    total = sum(pool.count for pool in scenario.pool)
    for num in range(1, total):
        pools = (replace(pool, count=num if pool.role == "prefill" else total - num) for pool in scenario.pool)
        settings = {**scenario.settings, "role_change": False}
        yield f"{num}P{total - num}D", replace(scenario, pool=tuple(pools), settings=settings)
    yield "as it is", scenario


def row(name: str, scenario: Scenario, found: Findings) -> tuple[str, ...]:
    """Of the table; latencies in milliseconds."""
    return (
        name,
        f"{found.num_good / scenario.duration_s:.2f}",
        ", ".join(f"{share:.0%}" for share in found.good_by_part),
        f"{found.num_refused:,}",
        f"{found.num_failed:,}",
        f"{found.ttft_ms.p90:,.0f}",
        f"{found.tpot_ms.p90:,.1f}",
        f"{found.num_role_changes}",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("scenario", type=Path, help="TOML or JSON file; docs/simulator.md describes it")
    parser.add_argument(
        "--stretch", type=float, nargs="+", default=[1.0], metavar="N", help="parts of the load last N times as long"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="instead of the scenario's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 for a refused scenario."""
    argv = sys.argv[1:] if argv is None else argv
    options, console, began_at = parse(argv), open_console(), time.monotonic()
    written = []
    try:
        base = read_scenario(options.scenario)
        for factor in options.stretch:
            for seed in options.seeds or [base.seed]:
                rows = []
                for name, scenario in splits(replace(stretched(base, factor), seed=seed)):
                    found = Findings.of(Simulation(scenario).run())
                    rows.append(row(name, scenario, found))
                    written.append({"split": name, "stretch": factor, "seed": seed, "findings": asdict(found)})
                title = f"{options.scenario.name}, parts {factor:g} times as long, seed {seed} (latencies in ms)"
                print_table(console, title, COLUMNS, rows)
    except ConfigError as error:
        exit_refused(error, PROGRAM)
    if options.json:
        found_in = conditions(PROGRAM, argv, took_s=time.monotonic() - began_at)
        write_json(options.json, {"conditions": found_in, "runs": written})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
