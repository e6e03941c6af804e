"""The planner beside simpler rules and beside one who knows the future, in virtual time.

Rivals' rules are written from what Dynamo and llm-d publish. Both pools of an 8B model on GPUs, goals of 500 and 25 ms
at p95, workers that start in 30 or 120 s. Each row is one controller on one load: the share of requests that met both
goals (a refused one met none), worker-seconds over those of the clairvoyant, and how often each pool changed. The world
is `world.py`; the planner is the router's own.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.load.report import open_console, print_table
from benchmarks.planner.loads import BOUNDS, GOALS, KINDS, Load, conversation, loads
from benchmarks.planner.rules import Clairvoyant, Interpolating, Planned, Saturation, Seeing, Threshold, Utilisation
from benchmarks.planner.world import CONTROL_S, Controller, Result, World, poisson
from benchmarks.script import run, script_parser, settings_of, write_result
from common.wire.message_fields import Role
from router.planner.planner import Planner
from router.planner.pool import Fleet, PoolState

PROGRAM: Final = "python -m benchmarks.planner"


def controllers(load: Load, *, floor: bool = False) -> dict[str, Controller]:
    """All that are compared; or, as a `floor`, those that know the rate exactly, with and without foresight."""
    chance = random.Random(7)
    sample = tuple(conversation(chance) for _ in range(400))
    starts: dict[Role, float] = {"prefill": load.start_s, "decode": load.start_s}
    fleet = Fleet({role: PoolState(kind) for role, kind in KINDS.items()}, 64, starts)
    clairvoyant = Clairvoyant(load.rate, sample, GOALS, BOUNDS, fleet)
    if floor:
        return {
            "clairvoyant": clairvoyant,
            "sees at once": Seeing(clairvoyant),
            "sees late": Seeing(clairvoyant, CONTROL_S),
        }
    return {
        "clairvoyant": clairvoyant,
        "planner": Planned(Planner(GOALS, BOUNDS)),
        "HPA, utilisation": Utilisation(BOUNDS),
        "threshold": Threshold(BOUNDS),
        "Dynamo's rule": Interpolating(GOALS, BOUNDS),
        "llm-d's rule": Saturation(BOUNDS),
    }


def measure(load: Load, seed: int, *, floor: bool = False) -> Iterator[tuple[str, World, Result]]:
    """Each controller's name, its world at the end, and the result."""
    for name, controller in controllers(load, floor=floor).items():
        requests = poisson(load.rate, load.seconds, conversation, seed)
        world = World(
            requests, KINDS, GOALS, controller, start={"prefill": 1, "decode": 1}, start_s=load.start_s, seed=seed
        )
        yield name, world, world.run(load.seconds)


def row_of(load: Load, name: str, result: Result, best: float) -> dict[str, Any]:
    """A result as JSON values; `best` is the cost of the clairvoyant."""
    return {
        "load": load.name,
        "controller": name,
        "met": round(result.met, 4),
        "refused": round(result.refused, 4),
        "prefill_s": round(result.worker_s["prefill"]),
        "decode_s": round(result.worker_s["decode"]),
        "over_clairvoyant": round(result.cost / best, 3),
        "changes": result.changes("prefill") + result.changes("decode"),
        "turns": result.turns("prefill") + result.turns("decode"),
    }


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="virtual time per load, in seconds")
    parser.add_argument("--only", default="", help="prefix of the names of the loads")
    parser.add_argument("--seed", type=int, default=1, help="random seed of arrivals, lengths and noise")
    parser.add_argument(
        "--floor", action="store_true", help="compare only controllers that know the rate, now or a look of 5 s later"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    rows, shown = [], []
    for load in loads(options.seconds):
        if not load.name.startswith(options.only):
            continue
        best = 0.0
        for name, _, result in measure(load, options.seed, floor=options.floor):
            best = best or result.cost
            rows.append(row := row_of(load, name, result, best))
            shown.append(
                (
                    load.name,
                    name,
                    f"{result.met:.1%}",
                    f"{result.refused:.1%}",
                    f"{row['prefill_s']}",
                    f"{row['decode_s']}",
                    f"{result.cost / best:.2f}",
                    f"{row['changes']}",
                    f"{row['turns']}",
                )
            )
    columns = ("load", "controller", "goals met", "refused", "prefill s", "decode s", "cost", "changes", "turns")
    print_table(open_console(), "pools under a controller", columns, shown, left=(0, 1))
    write_result(options, PROGRAM, argv, {"rows": rows}, **settings_of(options))
    return 0


if __name__ == "__main__":
    run(main)
