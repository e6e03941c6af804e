"""Several models under one budget, beside the same budget cut into equal parts, in virtual time.

    python -m benchmarks.planner.several --output several.json

Each model has pools of its own, an 8B model's on GPUs, goals of 500 and 25 ms at p95, and a load that peaks at another
time than those of the others. `one budget` is the router's own division (`router/planner/sizing/budget.py`); `equal
parts` plans each model within its part; `no budget` has as many workers as are wanted. The world is `world.py`.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.load.report import open_console, print_table
from benchmarks.planner.loads import GOALS, KINDS, conversation
from benchmarks.planner.rules import Planned
from benchmarks.planner.world import TICK_S, World, poisson
from benchmarks.script import run, script_parser, settings_of, write_result
from common.wire.message_fields import Role
from router.planner.planner import Planner
from router.planner.sizing.budget import Budget
from router.planner.sizing.pool import Bounds

PROGRAM: Final = "python -m benchmarks.planner.several"
MODELS: Final = ("a", "b", "c")
BOUNDS: Final[dict[Role, Bounds]] = {"prefill": Bounds(0, 40), "decode": Bounds(1, 40)}
PERIOD_S: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all models: the share of requests that met both goals, also by model, worker-seconds, and the most workers
    that were wanted at one time, after the first look."""

    arm: str
    met: float
    met_by_model: Sequence[float]
    worker_s: float
    most_wanted: int


def peak(low: float, high: float, number: int) -> Callable[[float], float]:
    """A rate that is high for a third of each period, and rises and falls within a minute: another third for each."""

    def rate(at: float) -> float:
        into = (at - number * PERIOD_S / len(MODELS)) % PERIOD_S
        length = PERIOD_S / len(MODELS)
        ramp = min(1.0, max(0.0, into / 60.0), max(0.0, (length - into) / 60.0))
        return low + (high - low) * ramp

    return rate


def budgets(arm: str, most: float) -> dict[str, Budget]:
    """The budget of each model, which may be the same one."""
    if arm == "one budget":
        return dict.fromkeys(MODELS, Budget(most))
    return {model: Budget(most / len(MODELS) if arm == "equal parts" else math.inf) for model in MODELS}


def measure(arm: str, most: float, rates: tuple[float, float], seconds: float, seed: int) -> Outcome:
    """All models side by side, tick by tick."""
    of_each, worlds = budgets(arm, most), []
    for number, model in enumerate(MODELS):
        planner = Planner(GOALS, BOUNDS, budget=of_each[model], model=model, idle_s=120.0)
        requests = poisson(peak(*rates, number), seconds, conversation, seed + number)
        start: dict[Role, int] = {"prefill": 1, "decode": 1}
        worlds.append(World(requests, KINDS, GOALS, Planned(planner), start=start, seed=seed + number))
    for tick in range(int(seconds / TICK_S)):
        for world in worlds:
            world.step((tick + 1) * TICK_S)
    results = [world.result(seconds) for world in worlds]
    nums = [len(world.all) for world in worlds]
    wanted = [
        sum(sum(look.values()) for look in looks) for looks in zip(*(one.history for one in results), strict=True)
    ]
    return Outcome(
        arm,
        sum(one.met * num for one, num in zip(results, nums, strict=True)) / sum(nums),
        [round(one.met, 4) for one in results],
        sum(one.cost for one in results),
        max(wanted[1:]),
    )


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("--seconds", type=float, default=2 * PERIOD_S, help="of virtual time")
    parser.add_argument("--budget", type=float, default=12.0, help="workers of all models together")
    parser.add_argument("--low", type=float, default=4.0, help="requests a second of a model")
    parser.add_argument("--high", type=float, default=60.0, help="the same while it peaks")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, lengths and noise")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options, rows, shown = parse(argv), [], []
    for arm in ("one budget", "equal parts", "no budget"):
        found = measure(arm, options.budget, (options.low, options.high), options.seconds, options.seed)
        rows.append(
            {
                "arm": arm,
                "met": round(found.met, 4),
                "met_by_model": found.met_by_model,
                "worker_s": round(found.worker_s),
                "most_wanted": found.most_wanted,
            }
        )
        each = ", ".join(f"{met:.1%}" for met in found.met_by_model)
        shown.append((arm, f"{found.met:.1%}", each, f"{found.worker_s:,.0f}", f"{found.most_wanted}"))
    columns = ("budget", "goals met", "by model", "worker-seconds", "most workers")
    print_table(open_console(), f"{len(MODELS)} models, {options.budget:g} workers", columns, shown, left=(0,))
    write_result(options, PROGRAM, argv, {"rows": rows}, **settings_of(options))
    return 0


if __name__ == "__main__":
    run(main)
