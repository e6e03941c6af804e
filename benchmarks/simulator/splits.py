"""What each fixed split of a scenario's workers brings, beside the scenario itself, whose workers may change roles.

    python -m benchmarks.simulator.splits benchmarks/data/alternating.toml --stretch 1 3 7.5

The scenario has one pool of each role; with none of the prefill workers decode workers compute all prompts. Goodput
counts requests that met both goals, over the time of arrivals. The last row takes for each part of the load the split
that serves it best, as if changes took no time and the load were known before it comes. `--rates` gives the parts of
the load other rates.
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
    for num in range(total):
        pools = (replace(pool, count=num if pool.role == "prefill" else total - num) for pool in scenario.pool)
        settings = {**scenario.settings, "role_change": False}
        yield f"{num}P{total - num}D", replace(scenario, pool=tuple(pools), settings=settings)
    yield "as it is", scenario


def at_rates(scenario: Scenario, rates: Sequence[float]) -> Scenario:
    """The scenario with other requests a second in the parts of its load; as it is without any. Raises ConfigError."""
    parts = scenario.load.parts
    if not rates:
        return scenario
    if len(rates) != len(parts):
        raise ConfigError("rates", list(rates), f"one for each of {len(parts)} parts")
    changed = tuple(replace(part, rate=rate) for part, rate in zip(parts, rates, strict=True))
    return replace(scenario, load=replace(scenario.load, parts=changed))


def best_of_parts(fixed: Sequence[Findings]) -> list[int]:
    """How many requests of each part of the load the split that serves that part best serves within goals."""
    good = [[share * num for share, num in zip(one.good_by_part, one.num_by_part, strict=True)] for one in fixed]
    return [round(max(of_part)) for of_part in zip(*good, strict=True)]


def bound_row(fixed: Sequence[Findings], seconds: float) -> tuple[str, ...]:
    """Of the table: the best split of each part."""
    best = best_of_parts(fixed)
    shares = ", ".join(f"{num / of:.0%}" for num, of in zip(best, fixed[0].num_by_part, strict=True))
    return ("best of each part", f"{sum(best) / seconds:.2f}", shares, *("-" for _ in COLUMNS[3:]))


def gain(fixed: Sequence[Findings], changing: Findings) -> dict[str, float]:
    """Goodput with changes over that of the best fixed split, and what the best split of each part would reach."""
    best = max(one.num_good for one in fixed)
    return {"gain": changing.num_good / best, "possible": sum(best_of_parts(fixed)) / best} if best else {}


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
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[], metavar="R", help="requests a second of the parts of the load"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="instead of the scenario's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 for a refused scenario."""
    argv = sys.argv[1:] if argv is None else argv
    options, console, began_at = parse(argv), open_console(), time.monotonic()
    written, gains = [], list[dict[str, float]]()
    try:
        base = at_rates(read_scenario(options.scenario), options.rates)
        for factor in options.stretch:
            for seed in options.seeds or [base.seed]:
                rows, found = [], []
                for name, scenario in splits(replace(stretched(base, factor), seed=seed)):
                    found.append(Findings.of(Simulation(scenario).run()))
                    rows.append(row(name, scenario, found[-1]))
                    written.append({"split": name, "stretch": factor, "seed": seed, "findings": asdict(found[-1])})
                *fixed, changing = found
                rows.append(bound_row(fixed, scenario.duration_s))
                title = f"{options.scenario.name}, parts {factor:g} times as long, seed {seed} (latencies in ms)"
                print_table(console, title, COLUMNS, rows)
                gains.append({"stretch": factor, "seed": seed, **gain(fixed, changing)})
                told = "as it is {gain:.3f} times the best fixed split; {possible:.3f} with the best of each part"
                console.print(told.format(**gains[-1]) if "gain" in gains[-1] else "no request met its goals")
    except ConfigError as error:
        exit_refused(error, PROGRAM)
    if options.json:
        found_in = conditions(PROGRAM, argv, took_s=time.monotonic() - began_at)
        write_json(options.json, {"conditions": found_in, "gains": gains, "runs": written})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
