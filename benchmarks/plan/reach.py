"""What can be met where the goals cannot: the largest load, and the tightest goals, within the bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from benchmarks.plan.candidate import Candidate
from benchmarks.plan.evidence import Evidence
from benchmarks.plan.search import Search
from benchmarks.plan.spec import PlanGoals
from benchmarks.plan.trials import Question

CONTENDERS = 3
"""So many of the candidates that came nearest are asked."""
LEAST_LOAD, MOST_LOOSENING = 1 / 32, 32.0
HALVINGS = 6
"""Of the logarithm of that range: to about 6 %."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What a candidate meets: a multiple of the load, or goals."""

    candidate: Candidate
    load_factor: float
    goals: PlanGoals
    attainment: float


@dataclass(frozen=True, slots=True)
class Reach:
    """`best` comes nearest to the goals. None: not within 32 times the goal, or a 32nd of the load.

    `ttft` loosens only the goal for the first token, `tpot` only the other; `both` is asked when neither helps.
    """

    best: Evidence
    load: Reached | None
    ttft: Reached | None
    tpot: Reached | None
    both: Reached | None


def reach(search: Search) -> Reach:
    """Bisect, with one run each; something must have been judged. Raises ValueError when nothing was."""
    ranked = search.ranked()
    if not ranked:
        raise ValueError("no candidate was simulated")
    contenders = [one.candidate for one in ranked[:CONTENDERS]]
    goals = search.trials.spec.goals

    def looser(ttft: bool, tpot: bool) -> Callable[[float], tuple[float, PlanGoals]]:
        def at(factor: float) -> tuple[float, PlanGoals]:
            by = {"ttft_ms": goals.ttft_ms * factor} if ttft else {}
            by |= {"tpot_ms": goals.tpot_ms * factor} if tpot else {}
            return 1.0, msgspec.structs.replace(goals, **by)

        return at

    def bisected(text: str, at: Callable[[float], tuple[float, PlanGoals]]) -> Reached | None:
        search.say(text)
        return _bisected(search, contenders, at)

    load = bisected("the largest load that meets the goals", lambda factor: (1.0 / factor, goals))
    ttft = bisected("the tightest TTFT", looser(True, False)) if goals.ttft_ms else None
    tpot = bisected("the tightest TPOT", looser(False, True)) if goals.tpot_ms else None
    asks_both = goals.ttft_ms and goals.tpot_ms and not (ttft or tpot)
    both = bisected("the tightest goals", looser(True, True)) if asks_both else None
    return Reach(ranked[0], load, ttft, tpot, both)


def _bisected(
    search: Search, contenders: list[Candidate], at: Callable[[float], tuple[float, PlanGoals]]
) -> Reached | None:
    """The smallest factor, above 1, at which one of the contenders meets what `at` asks; None: not even the largest."""
    best = _met(search, contenders, *at(MOST_LOOSENING))
    low, high = 1.0, MOST_LOOSENING
    if best is None:
        return None
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        found = _met(search, contenders, *at(middle))
        low, high, best = (low, middle, found) if found else (middle, high, best)
    return best


def _met(search: Search, contenders: list[Candidate], load_factor: float, goals: PlanGoals) -> Reached | None:
    """The first contender that meets these goals at so many times the load, in one run."""
    trials = search.trials
    for candidate in contenders:
        trials.run([Question(candidate, trials.spec.seed, load_factor, goals)])
        found = trials.evidence(candidate, load_factor=load_factor, goals=goals)
        if found.attainment >= goals.quantile:
            return Reached(candidate, load_factor, goals, found.attainment)
    return None
