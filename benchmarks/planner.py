"""The planner beside simpler rules and beside one who knows the future, in virtual time.

Rivals' rules are written from what Dynamo and llm-d publish. Both pools of an 8B model on GPUs, goals of 500 and 25 ms
at p95, workers that start in 30 or 120 s. Each row is one controller on one load: the share of requests that met both
goals (a refused one met none), worker-seconds over those of the clairvoyant, and how often each pool changed. The world
is `planner_world.py`; the planner is the router's own.
"""

from __future__ import annotations

import math
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.planner_rules import Clairvoyant, Interpolating, Planned, Saturation, Threshold, Utilisation
from benchmarks.planner_world import Controller, Result, World, poisson
from benchmarks.report import open_console, print_table
from benchmarks.script import run, script_parser, settings_of, write_result
from common.latency.step_model import StepModel
from common.wire.message_fields import Role
from router.planner.load import SampledRequest
from router.planner.planner import Planner
from router.planner.pool import Bounds, Fleet, Goals, PoolState, WorkerKind

PROGRAM: Final = "python -m benchmarks.planner"
MODEL: Final = StepModel(
    fixed_s=4e-3, floor_s=8e-3, token_s=4e-5, pair_s=1.5e-9, row_s=3e-5, context_s=2.5e-8, num_steps=1000
)
KINDS: Final[dict[Role, WorkerKind]] = {
    "prefill": WorkerKind(MODEL, num_blocks=25_000, block_size=16, max_num_seqs=64, step_tokens=2048),
    "decode": WorkerKind(MODEL, num_blocks=25_000, block_size=16, max_num_seqs=128, step_tokens=512),
}
GOALS: Final = Goals(0.5, 0.025, 0.95)
BOUNDS: Final[dict[Role, Bounds]] = {"prefill": Bounds(1, 40), "decode": Bounds(1, 40)}


def conversation(chance: random.Random) -> SampledRequest:
    """Log-normal lengths about those of the Azure conversation trace of 2023: medians of 900 and 180 tokens."""
    num_prompt = min(8000, max(70, round(chance.lognormvariate(6.8, 0.8))))
    return SampledRequest(num_prompt, 0, min(1000, max(8, round(chance.lognormvariate(5.2, 0.6)))))


@dataclass(frozen=True)
class Load:
    """A rate over time, and what a worker takes to start."""

    name: str
    rate: Callable[[float], float]
    seconds: float
    start_s: float = 30.0


def sine(low: float, high: float, period_s: float) -> Callable[[float], float]:
    return lambda at: low + (high - low) * (1 - math.cos(2 * math.pi * at / period_s)) / 2


def loads(seconds: float) -> Iterator[Load]:
    yield Load("sine 5-45/s", sine(5.0, 45.0, 1200.0), seconds)
    yield Load("sine, starts of 120 s", sine(5.0, 45.0, 1200.0), seconds, 120.0)
    yield Load("steady 20/s", lambda at: 20.0, seconds)
    yield Load("burst 8 to 32/s", lambda at: 32.0 if seconds / 3 <= at < seconds / 2 else 8.0, seconds)
    yield Load("idle between", lambda at: 15.0 if at % 1800.0 < 600.0 else 0.0, seconds)


def controllers(load: Load) -> dict[str, Controller]:
    chance = random.Random(7)
    sample = tuple(conversation(chance) for _ in range(400))
    starts: dict[Role, float] = {"prefill": load.start_s, "decode": load.start_s}
    fleet = Fleet({role: PoolState(kind) for role, kind in KINDS.items()}, 64, starts)
    return {
        "clairvoyant": Clairvoyant(load.rate, sample, GOALS, BOUNDS, fleet),
        "planner": Planned(Planner(GOALS, BOUNDS)),
        "HPA, utilisation": Utilisation(BOUNDS),
        "threshold": Threshold(BOUNDS),
        "Dynamo's rule": Interpolating(GOALS, BOUNDS),
        "llm-d's rule": Saturation(BOUNDS),
    }


def measure(load: Load, seed: int) -> Iterator[tuple[str, World, Result]]:
    """Each controller's name, its world at the end, and the result."""
    for name, controller in controllers(load).items():
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
    parser.add_argument("--seconds", type=float, default=3600.0, help="of virtual time for each load")
    parser.add_argument("--only", default="", help="loads whose name begins so")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, lengths and noise")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    rows, shown = [], []
    for load in loads(options.seconds):
        if not load.name.startswith(options.only):
            continue
        best = 0.0
        for name, _, result in measure(load, options.seed):
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
