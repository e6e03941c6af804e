"""TTFT of one prefill worker by the order in which it computes prompts, in virtual time.

The prompts have the lengths of a trace. They arrive at random (`poisson`) or as in the trace, faster or slower, so that
the worker would need the given share of its time for them alone. Steps take the time that a `StepModel` says, by
default that of an 8B model on one GPU. The worker has room for all prompts and caches none.

`fcfs` is first come, first served; `shortest` the shortest remaining time first without a bound; `slack` judges the
slack of each prompt alone, and the others follow shortest first; `order` is `common/sequences/prompt_order.py`.
"""

from __future__ import annotations

import math
import random
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.load.report import open_console, print_table
from benchmarks.load.trace import TraceRow, read_trace
from benchmarks.script import run, script_parser, settings_of, write_result
from common.latency.step_model import StepModel, StepShape
from common.sequences.prompt_order import PromptOrder, prompt_order

PROGRAM: Final = "python -m benchmarks.prompt_order"


@dataclass(eq=False, slots=True)
class VirtualPrompt:
    """A prompt of the virtual worker. Times in seconds."""

    accepted_at: float
    num_tokens: int
    due_at: float
    num_computed: int = 0
    first_token_at: float = 0.0
    has_output: bool = False
    priority: int = 0

    @property
    def num_remaining(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def remaining_shape(self) -> StepShape:
        return StepShape.of_prompt(self.num_computed, self.num_tokens)

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.accepted_at


Order = Callable[[Sequence[VirtualPrompt], float, StepModel, int], PromptOrder[VirtualPrompt]]


def first_come(
    prompts: Sequence[VirtualPrompt], now: float, model: StepModel, budget: int
) -> PromptOrder[VirtualPrompt]:
    return PromptOrder(sorted(prompts, key=lambda prompt: prompt.accepted_at))


def shortest(prompts: Sequence[VirtualPrompt], now: float, model: StepModel, budget: int) -> PromptOrder[VirtualPrompt]:
    return PromptOrder(sorted(prompts, key=lambda prompt: (prompt.num_remaining, prompt.accepted_at)))


def own_slack(
    prompts: Sequence[VirtualPrompt], now: float, model: StepModel, budget: int
) -> PromptOrder[VirtualPrompt]:
    def key(prompt: VirtualPrompt) -> tuple[bool, float, int]:
        slack = prompt.due_at - now - model.steps_s(prompt.remaining_shape, budget)
        is_late = slack < 0.0 or slack == math.inf
        return is_late, 0.0 if is_late else slack, prompt.num_remaining

    return PromptOrder(sorted(prompts, key=key))


ORDERS: Final[dict[str, Order]] = {
    "fcfs": first_come,
    "shortest": shortest,
    "slack": own_slack,
    "order": prompt_order,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one order served one load; `met` is the share of prompts within the goal."""

    trace: str
    load: float
    goal_s: float
    order: str
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    met: float


class VirtualWorker:
    """A prefill worker in virtual time: the prompts that are `here`, computed step by step."""

    def __init__(self, order: Order, model: StepModel, budget: int) -> None:
        self._order, self._model, self._budget = order, model, budget
        self.here: list[VirtualPrompt] = []
        self.now = 0.0

    def step(self) -> None:
        """Compute one step of the prompts that are here."""
        parts = list(split(self._order(self.here, self.now, self._model, self._budget), self._budget))
        self.now += self._model.seconds(
            StepShape.sum(StepShape.of_prompt(p.num_computed, p.num_computed + num_tokens) for p, num_tokens in parts)
        )
        for prompt, num_tokens in parts:
            prompt.num_computed += num_tokens
            if not prompt.num_remaining:
                prompt.first_token_at = self.now
                self.here.remove(prompt)


def serve(prompts: Iterable[VirtualPrompt], order: Order, model: StepModel, budget: int) -> None:
    """Compute prompts, which come in order of their arrival."""
    coming = iter(prompts)
    upcoming = next(coming, None)
    worker = VirtualWorker(order, model, budget)
    while worker.here or upcoming:
        if not worker.here and upcoming:
            worker.now = max(worker.now, upcoming.accepted_at)
        while upcoming and upcoming.accepted_at <= worker.now:
            worker.here.append(upcoming)
            upcoming = next(coming, None)
        worker.step()


def split(order: PromptOrder[VirtualPrompt], budget: int) -> Iterator[tuple[VirtualPrompt, int]]:
    """One step's tokens."""
    left = budget
    for prompt in order.prompts:
        num_tokens = min(left, prompt.num_remaining, order.most_tokens(prompt, budget))
        if num_tokens:
            yield prompt, num_tokens
            left -= num_tokens


def arrivals(
    rows: Sequence[TraceRow], load: float, goal_s: float, model: StepModel, options: Namespace
) -> list[VirtualPrompt]:
    """Prompts that keep the worker busy for a share `load` of the time."""
    per_token_s = model.fixed_s / options.budget  # a full step's
    busy_s = sum(
        model.steps_s(StepShape.of_prompt(0, row.input_len), options.budget)
        - model.fixed_s * -(-row.input_len // options.budget)
        + per_token_s * row.input_len
        for row in rows
    )
    rng = random.Random(options.seed)
    if options.arrivals == "trace":
        span_s = max(1e-9, rows[-1].arrival_s - rows[0].arrival_s)
        times = [(row.arrival_s - rows[0].arrival_s) * busy_s / load / span_s for row in rows]
    else:
        times = sorted(rng.uniform(0.0, busy_s / load) for _ in rows)
    due = goal_s or math.inf
    return [VirtualPrompt(at, row.input_len, at + due) for at, row in zip(times, rows, strict=True)]


def measure(path: Path, options: Namespace, model: StepModel) -> Iterator[Outcome]:
    rows = read_trace(path)
    rows = (
        rows[: options.num_requests]
        if options.arrivals == "trace"
        else rows[:: max(1, len(rows) // options.num_requests)]
    )
    for load in options.loads:
        for goal_s in options.goals:
            for name, order in ORDERS.items():
                prompts = arrivals(rows, load, goal_s, model, options)
                serve(prompts, order, model, options.budget)
                ttfts = np.array([prompt.ttft_s for prompt in prompts])
                p50, p95, p99 = (round(float(value), 4) for value in np.percentile(ttfts, (50, 95, 99)))
                met = float(np.mean([prompt.first_token_at <= prompt.due_at for prompt in prompts]))
                mean, most = round(float(ttfts.mean()), 4), round(float(ttfts.max()), 4)
                yield Outcome(path.name.partition(".")[0], load, goal_s, name, mean, p50, p95, p99, most, round(met, 4))


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="trace files, as `diptych bench --trace` reads them")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 0.95], help="shares of the worker's time")
    parser.add_argument(
        "--goals", type=float, nargs="+", default=[0.0, 1.0], help="seconds to the first token; 0: none"
    )
    parser.add_argument("--num-requests", type=int, default=600, help="of each trace")
    parser.add_argument("--arrivals", choices=("poisson", "trace"), default="poisson", help="when prompts arrive")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--fixed-ms", type=float, default=4.0, help="of each step")
    parser.add_argument("--floor-ms", type=float, default=12.0, help="the least for the tokens of a step")
    parser.add_argument("--token-us", type=float, default=40.0, help="of each token")
    parser.add_argument("--pair-ns", type=float, default=1.5, help="of each pair of tokens in attention")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    model = StepModel(
        fixed_s=options.fixed_ms * 1e-3,
        floor_s=options.floor_ms * 1e-3,
        token_s=options.token_us * 1e-6,
        pair_s=options.pair_ns * 1e-9,
        num_steps=1,
    )
    outcomes = [outcome for path in options.traces for outcome in measure(path, options, model)]
    columns = ("trace", "load", "goal", "order", "mean", "p50", "p95", "p99", "max", "goal met")
    shown = [
        (
            one.trace,
            f"{one.load:g}",
            f"{one.goal_s:g}" if one.goal_s else "-",
            one.order,
            *(f"{value:.3f}" for value in (one.mean_s, one.p50_s, one.p95_s, one.p99_s, one.max_s)),
            f"{one.met:.1%}" if one.goal_s else "-",
        )
        for one in outcomes
    ]
    print_table(open_console(), "TTFT in seconds", columns, shown, left=(0, 3))
    settings = settings_of(options) | {"traces": [path.name for path in options.traces]}
    write_result(options, PROGRAM, argv, {"rows": [asdict(one) for one in outcomes]}, **settings)
    return 0


if __name__ == "__main__":
    run(main)
