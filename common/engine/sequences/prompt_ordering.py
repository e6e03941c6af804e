"""The order in which a worker computes prompts. Pure: `now` and the times of steps come in.

1. Prompts whose client reads already (a takeover, a preemption), oldest first: its stream stands still meanwhile.
   The others by priority, the highest first, and among those of one priority:
2. Prompts that can meet their goal, each behind those before it: of the prompts by due time, the longest leaves
   whenever one would be late, which keeps the most in time (Moore, "An n job, one machine sequencing algorithm",
   Management Science, 1968). To judge each prompt alone is not enough: in an overload each would wait until its slack
   is gone, and then make the next one late. A shorter prompt passes those that can spare its time: it takes at most a
   share of their slack, which is the time left until they are due less that of the prompts before them and their own.
3. Prompts without a goal, and those that will miss theirs: the shortest remaining time first, which gives the least
   mean (Schrage, "A proof of the optimality of the shortest remaining processing time discipline", Operations
   Research, 1968). Few prompts lose by it (Bansal and Harchol-Balter, "Analysis of SRPT Scheduling", SIGMETRICS 2001).

Nothing starves: the oldest prompt, once it has waited `PATIENCE_S`, is the *elder*. It comes first for blocks, and a
share of each step is its own until it is computed; then the next one is the elder. So a prompt is computed at the
latest when that share alone has computed it and all older ones. To let all old prompts go first instead would turn
every overload into first come, first served, in which short prompts wait behind all long ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.latency import NOTHING, StepModel, StepShape

PATIENCE_S = 20.0
"""Seconds after which the oldest prompt is the elder: longer than bursts last, shorter than clients wait."""
ELDER_SHARE = 1 / 8
"""The share of each step's tokens for the elder: enough to end every wait, and little for those that can meet goals."""
PASSING_SHARE = 1 / 4
"""The share of a prompt's slack that one which passes it may take: the rest is for prompts that are yet to come."""
MAX_PASSING = 16
"""How many prompts of one step may pass others, so that a long queue does not slow the step down."""


class OrderedPrompt(Protocol):
    """What the order must know of a prompt. Times are of one clock, in seconds; `due_at` is infinite without a goal."""

    @property
    def accepted_at(self) -> float: ...
    @property
    def due_at(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def has_output(self) -> bool: ...
    @property
    def num_remaining(self) -> int: ...
    @property
    def remaining_shape(self) -> StepShape: ...


P = TypeVar("P", bound=OrderedPrompt)


@dataclass(frozen=True, slots=True)
class PromptOrder(Generic[P]):
    """The prompts in turn; the elder, if there is one, is the first of them."""

    prompts: Sequence[P]
    elder: P | None = None

    def most_tokens(self, prompt: P, budget: int) -> int:
        """How many tokens of a step of `budget` tokens the prompt may take, before others take theirs."""
        if prompt is not self.elder:
            return budget
        others = sum(other.num_remaining for other in self.prompts if other is not prompt)
        return max(math.ceil(ELDER_SHARE * budget), budget - others)


@dataclass(frozen=True, slots=True)
class _Job(Generic[P]):
    """A prompt, and the seconds that steps take for what is left of it; 0 while no model is known.

    `length` sorts the shortest first, the oldest among equals. Tokens decide while no time is known.
    """

    prompt: P
    seconds: float
    due_at: float
    length: tuple[float, int, float]

    @classmethod
    def of(cls, prompt: P, seconds: float) -> _Job[P]:
        return cls(prompt, seconds, prompt.due_at, (seconds, prompt.num_remaining, prompt.accepted_at))


def prompt_order(
    prompts: Iterable[P], now: float, model: StepModel, budget: int, beside: StepShape = NOTHING
) -> PromptOrder[P]:
    """The order of prompts that are all here at `now`, for steps of `budget` prompt tokens and `beside` in each."""
    by_age = sorted(prompts, key=lambda prompt: prompt.accepted_at)
    if len(by_age) < 2:  # as in most steps at low load
        return _with_elder(by_age, [prompt for prompt in by_age if not prompt.has_output], now)
    seconds = _predictor(model, budget, beside)
    jobs = [_Job.of(prompt, seconds(prompt)) for prompt in by_age]
    begun = [job for job in jobs if job.prompt.has_output]
    new = [job for job in jobs if not job.prompt.has_output]
    ordered, end = begun, now
    for priority in sorted({job.prompt.priority for job in new}, reverse=True):
        equal = [job for job in new if job.prompt.priority == priority]
        ordered += _by_slack(equal, end, budget)
        end += sum(job.seconds for job in equal)
    return _with_elder([job.prompt for job in ordered], [job.prompt for job in new], now)


def _with_elder(in_turn: list[P], new: list[P], now: float) -> PromptOrder[P]:
    """The order, in which the oldest prompt without output comes first once it has waited for too long."""
    if not new or now - new[0].accepted_at <= PATIENCE_S:
        return PromptOrder(in_turn)
    elder = new[0]
    return PromptOrder([elder, *(prompt for prompt in in_turn if prompt is not elder)], elder)


def _by_slack(jobs: Sequence[_Job[P]], now: float, budget: int) -> list[_Job[P]]:
    """New jobs of one priority in turn, where the first of them begins at `now`."""
    on_time, rest = _on_time([job for job in jobs if job.due_at < math.inf], now)
    rest += [job for job in jobs if job.due_at == math.inf]
    return [*_with_passing(on_time, now, budget), *sorted(rest, key=lambda job: job.length)]


def _predictor(model: StepModel, budget: int, beside: StepShape) -> Callable[[OrderedPrompt], float]:
    if not model.knows_prompts:
        return lambda prompt: 0.0
    return lambda prompt: model.steps_s(prompt.remaining_shape, budget, beside)


def _on_time(jobs: Iterable[_Job[P]], now: float) -> tuple[list[_Job[P]], list[_Job[P]]]:
    """The most jobs that can all be in time, by due time, and the others."""
    kept: list[tuple[float, int, _Job[P]]] = []
    late: list[_Job[P]] = []
    end = now
    for place, job in enumerate(sorted(jobs, key=lambda job: (job.due_at, job.length))):
        heapq.heappush(kept, (-job.seconds, -place, job))
        end += job.seconds
        if end > job.due_at:
            *_, longest = heapq.heappop(kept)
            end -= longest.seconds
            late.append(longest)
    return [job for *_, job in sorted(kept, key=lambda entry: -entry[1])], late


def _with_passing(jobs: list[_Job[P]], now: float, budget: int) -> list[_Job[P]]:
    """Jobs that are all in time in their order, with shorter ones moved ahead of those that can spare their time.

    Only as far as a step of `budget` tokens reaches: the next step sees again.
    """
    left, least_s = list(jobs), min((job.seconds for job in jobs), default=0.0)
    ahead: list[_Job[P]] = []
    while left and budget > 0 and len(ahead) < MAX_PASSING:
        job = left.pop(_next(left, now, least_s))
        ahead.append(job)
        now += job.seconds
        budget -= job.prompt.num_remaining
    return [*ahead, *left]


def _next(jobs: Sequence[_Job[P]], now: float, least_s: float) -> int:
    """The place of the shortest job that all jobs before it can let pass; none takes less than `least_s`."""
    best, end, spare = 0, now, math.inf
    for place, job in enumerate(jobs):
        if job.seconds <= spare and job.length < jobs[best].length:
            best = place
        end += job.seconds
        spare = min(spare, PASSING_SHARE * (job.due_at - end))
        if spare < least_s:
            break
    return best
