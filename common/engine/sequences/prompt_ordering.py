"""Order in which a worker computes prompts. Pure: `now` and step times are arguments.

1. Prompts whose client is already reading (takeovers, preemptions), oldest first, because their streams are stalled.
   The others follow by priority, highest first. Within a priority:
2. Prompts that can meet their deadline when computed in sequence: by due time; whenever one would be late, the longest
   is removed, which maximises the number in time (Moore, "An n job, one machine sequencing algorithm", Management
   Science, 1968). Judging each prompt separately does not work: in an overload, each would wait until its slack is
   exhausted and then delay the next. A shorter prompt may overtake others if it uses at most a share of their slack,
   that is, the time until they are due minus the time of the preceding prompts and their own.
3. Prompts without a deadline, and those that will miss it: shortest remaining time first, which minimises the mean
   (Schrage, "A proof of the optimality of the shortest remaining processing time discipline", Operations Research,
   1968). Few prompts are worse off (Bansal and Harchol-Balter, "Analysis of SRPT Scheduling", SIGMETRICS 2001).

To prevent starvation, the oldest prompt becomes the *elder* after `PATIENCE_S`. It gets blocks first and a guaranteed
share of each step until it is computed; then the next one may become the elder. The completion time of every prompt is
thereby bounded. Giving priority to all old prompts instead would turn every overload into first come, first served, in
which short prompts queue after all long ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.latency import NOTHING, StepModel, StepShape

PATIENCE_S = 20.0
"""Age, in seconds, at which the oldest prompt becomes the elder: longer than bursts, shorter than client timeouts."""
ELDER_SHARE = 1 / 8
"""Elder's share of each step's tokens: enough to bound every wait, with little impact on prompts with deadlines."""
PASSING_SHARE = 1 / 4
"""Share of a prompt's slack that an overtaking prompt may use. The rest is reserved for later arrivals."""
LATE_MARGIN = 0.1
"""A prompt is late if it is predicted to miss its goal by more than this share of it. Predictions have errors."""
MAX_PASSING = 16
"""Maximum number of overtaking prompts per step, so that a long queue does not slow the step down."""


class OrderedPrompt(Protocol):
    """Properties of a prompt used for ordering. Times are in seconds of one clock; `due_at` is infinite if unset."""

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
    """The prompts in order. The elder, if any, is first. `num_on_time` new prompts will meet their goal in this order.

    `late` are the ids of prompts that will miss theirs.
    """

    prompts: Sequence[P]
    elder: P | None = None
    num_on_time: int = 0
    late: frozenset[int] = frozenset()

    def is_late(self, prompt: P) -> bool:
        """Return whether a prompt will miss its goal, and is not the elder."""
        return id(prompt) in self.late and prompt is not self.elder

    def most_tokens(self, prompt: P, budget: int) -> int:
        """Return the maximum number of tokens for a prompt in a step of `budget` tokens."""
        if prompt is not self.elder:
            return budget
        others = sum(other.num_remaining for other in self.prompts if other is not prompt)
        return max(math.ceil(ELDER_SHARE * budget), budget - others)


@dataclass(frozen=True, slots=True)
class _Job(Generic[P]):
    """A prompt and the predicted time, in seconds, of its remaining steps; 0 if no model is known.

    `length` is the sort key for shortest first, then oldest. If times are unknown, tokens determine the order.
    """

    prompt: P
    seconds: float
    due_at: float
    length: tuple[float, int, float]

    @classmethod
    def of(cls, prompt: P, seconds: float) -> _Job[P]:
        return cls(prompt, seconds, prompt.due_at, (seconds, prompt.num_remaining, prompt.accepted_at))


def prompt_order(
    prompts: Iterable[P], now: float, model: StepModel, budget: int, decode_rows: StepShape = NOTHING
) -> PromptOrder[P]:
    """Return the order of `prompts` at `now`, for steps of `budget` prompt tokens with `decode_rows`."""
    by_age = sorted(prompts, key=lambda prompt: prompt.accepted_at)
    seconds = _predictor(model, budget, decode_rows)
    if len(by_age) < 2:  # the common case at low load
        goals = [one for one in by_age if one.due_at < math.inf and not one.has_output]
        late = frozenset(id(one) for one in goals if _is_late(one, now + seconds(one)))
        return _with_elder(by_age, [one for one in by_age if not one.has_output], now, len(goals) - len(late), late)
    jobs = [_Job.of(prompt, seconds(prompt)) for prompt in by_age]
    begun = [job for job in jobs if job.prompt.has_output]
    new = [job for job in jobs if not job.prompt.has_output]
    ordered, end, num_on_time = begun, now, 0
    all_late: list[_Job[P]] = []
    for priority in sorted({job.prompt.priority for job in new}, reverse=True):
        equal = [job for job in new if job.prompt.priority == priority]
        on_time, late_jobs = _on_time([job for job in equal if job.due_at < math.inf], end)
        rest = [*late_jobs, *(job for job in equal if job.due_at == math.inf)]
        ordered += [*_with_passing(on_time, end, budget), *sorted(rest, key=lambda job: job.length)]
        first_end = end + sum(job.seconds for job in on_time)
        all_late += [job for job in late_jobs if _is_late(job.prompt, first_end + job.seconds)]
        num_on_time += len(on_time)
        end += sum(job.seconds for job in equal)
    late = frozenset(id(job.prompt) for job in all_late)
    return _with_elder([job.prompt for job in ordered], [job.prompt for job in new], now, num_on_time, late)


def _is_late(prompt: OrderedPrompt, end: float) -> bool:
    """Return whether a prompt that ends at `end` misses its goal by more than predictions may err."""
    return end > prompt.due_at + LATE_MARGIN * (prompt.due_at - prompt.accepted_at)


def _with_elder(in_turn: list[P], new: list[P], now: float, num_on_time: int, late: frozenset[int]) -> PromptOrder[P]:
    """Move the oldest prompt without output to the front if it has waited too long."""
    if not new or now - new[0].accepted_at <= PATIENCE_S:
        return PromptOrder(in_turn, None, num_on_time, late)
    elder = new[0]
    others = [prompt for prompt in in_turn if prompt is not elder]
    return PromptOrder([elder, *others], elder, num_on_time, late)


def _predictor(model: StepModel, budget: int, decode_rows: StepShape) -> Callable[[OrderedPrompt], float]:
    if not model.knows_prompts:
        return lambda prompt: 0.0
    return lambda prompt: model.steps_s(prompt.remaining_shape, budget, decode_rows)


def _on_time(jobs: Iterable[_Job[P]], now: float) -> tuple[list[_Job[P]], list[_Job[P]]]:
    """Split jobs into the largest set that can all be in time, by due time, and the others."""
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
    """Move shorter jobs ahead of jobs with enough slack. All jobs remain in time.

    Only as far as a step of `budget` tokens reaches, because the next step orders again.
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
    """Return the index of the shortest job that all jobs before it can let pass; none takes less than `least_s`."""
    best, end, spare = 0, now, math.inf
    for place, job in enumerate(jobs):
        if job.seconds <= spare and job.length < jobs[best].length:
            best = place
        end += job.seconds
        spare = min(spare, PASSING_SHARE * (job.due_at - end))
        if spare < least_s:
            break
    return best
