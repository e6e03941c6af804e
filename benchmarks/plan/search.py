"""Finds the cheapest candidate that meets the goals, with few simulations. It always asks in the same order.

1. Formulas drop what cannot hold the load.
2. Among candidates with the same flags, more workers of a kind are taken to do no harm. So a simulation that fails
   drops all that have no more, and one that succeeds all that cost as much. The next simulation is of the cheapest
   that is predicted to succeed; once one has, of those below its cost that drop the most if they fail.
3. Flags are varied for candidates that cost less and nearly succeeded, one at a time, as long as that helps.

Each candidate is judged by a race (Maron and Moore, "Hoeffding races", NIPS 1993): one run, on the same load as all
others, drops what is far from the goals; others get more seeds until the interval of the share that met the goals
excludes the quantile, or the seeds are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.plan.candidate import Candidate, base_flags, every, neighbours, plain, shapes, varies
from benchmarks.plan.evidence import Evidence, wilson
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.trials import Question, Trials

AT_ONCE, FEW_AT_ONCE = 4, 2
"""Candidates of one round, and of one of which the first is likely to succeed: not the number of processes, which would
decide what is tried."""
DEARER = 2.0
"""One pool is only looked for up to so many times the cost of two: beyond, it is no choice."""
FEWEST_SEEDS = 3
FAR = 0.03
"""A candidate whose first run misses the quantile by more, beyond Wilson's interval, gets no second one."""
NEAR_MISSES, NEAR = 3, 0.3
"""Flags are varied for so many candidates, whose attainment is within this of the quantile."""
HELPS = 0.002
MOST_PASSES = 3


@dataclass(slots=True)
class Search:
    """`say` hears what is searched now, in a few words."""

    trials: Trials
    outlook: Outlook
    say: Callable[[str], None] = field(default=lambda text: None)

    def best(self) -> Evidence | None:
        """The cheapest candidate that meets the goals, the most attained among equals; None when none does."""
        spec, flags = self.trials.spec, base_flags(self.trials.spec)
        self.say("two pools")
        self._cheapest(shapes(spec, flags, one_pool=False))
        self.say("one pool")
        best = self.found()
        limit = DEARER * self._cost(best.candidate) if best else math.inf
        self._cheapest(shapes(spec, flags, one_pool=True), limit)
        if not self.trials.num_run:
            self.say("the largest pools")
            self._largest()
        self._vary_flags()
        return self.found()

    def exhaustive(self) -> Evidence | None:
        """The same by judging every candidate that the bounds allow."""
        self.say("every candidate")
        candidates = every(self.trials.spec)
        for begin in range(0, len(candidates), AT_ONCE):
            self.judge(candidates[begin : begin + AT_ONCE])
        return self.found()

    def found(self) -> Evidence | None:
        """The best of what was judged so far."""
        met = (one for one in self.trials.all_evidence() if self.meets(one) and self.is_settled(one))
        return min(met, key=self._rank, default=None)

    def ranked(self) -> list[Evidence]:
        """All that was judged: those that meet the goals by cost, those that ran once behind them,
        then the others by attainment."""
        judged = self.trials.all_evidence()
        met = sorted(
            (one for one in judged if self.meets(one)), key=lambda one: (not self.is_settled(one), *self._rank(one))
        )
        missed = sorted(
            (one for one in judged if not self.meets(one)), key=lambda one: (-one.attainment, *self._rank(one))
        )
        return [*met, *missed]

    def meets(self, found: Evidence) -> bool:
        """Whether the share that met both goals is the quantile at least."""
        return found.attainment >= self.trials.spec.goals.quantile

    def judge(self, candidates: Iterable[Candidate]) -> list[Evidence]:
        """Simulate candidates as often as the verdict needs."""
        asked = list(dict.fromkeys(candidates))
        most, goals = self.trials.spec.search.seeds, self.trials.spec.goals
        racing = asked
        for number in range(most):
            seed = self.trials.spec.seed + number
            self.trials.run(Question(one, seed, 1.0, goals) for one in racing)
            racing = [one for one in racing if not self._is_decided(self.trials.evidence(one))]
        return [self.trials.evidence(one) for one in asked]

    def is_settled(self, found: Evidence) -> bool:
        """Whether further runs would not change the verdict, or none are left."""
        return len(found.trials) == self.trials.spec.search.seeds or self._is_decided(found)

    def _is_decided(self, found: Evidence) -> bool:
        quantile = self.trials.spec.goals.quantile
        if len(found.trials) < FEWEST_SEEDS:
            _, high = wilson(sum(trial.num_good for trial in found.trials), found.num_requests)
            return high < quantile - FAR
        low, high = found.interval
        return not low <= quantile <= high

    def _rank(self, found: Evidence) -> tuple[float, float, Candidate]:
        return (self._cost(found.candidate), -found.attainment, found.candidate)

    def _cost(self, candidate: Candidate) -> float:
        return candidate.cost(self.trials.spec)

    # ------------------------------------------------------------ numbers of workers

    def _cheapest(self, candidates: Sequence[Candidate], limit: float = math.inf) -> None:
        """Judge until the cheapest of these, which have the same flags and cost at most `limit`, is known."""
        left = [one for one in candidates if self._cost(one) <= limit and self.outlook.can_hold(one)]
        strain = {one: self.outlook.strain(one) for one in left}
        best: Candidate | None = None
        while left:
            asked = self._next(left, strain, best)
            for found in self._first_to_meet(asked):
                if self.meets(found):
                    best = found.candidate
                else:
                    left = [one for one in left if not one.has_at_most(found.candidate)]
            left = [one for one in left if one not in asked and (best is None or self._is_better(one, best, strain))]

    def _largest(self) -> None:
        """Judge some of the largest pools, to know how far all are off, where formulas exclude all that there are."""
        spec, flags = self.trials.spec, base_flags(self.trials.spec)
        found = [one for one_pool in (False, True) for one in shapes(spec, flags, one_pool=one_pool)]
        self.judge(self._next(found, {one: self.outlook.strain(one) + 1.0 for one in found}, None))

    def _first_to_meet(self, asked: Sequence[Candidate]) -> list[Evidence]:
        """Simulate all of them once, then judge them from the cheapest on until one meets the goals.

        Returns the judged ones, without those that cost more than that one.
        """
        self.trials.run(Question(one, self.trials.spec.seed, 1.0, self.trials.spec.goals) for one in asked)
        judged = []
        for first in sorted(map(self.trials.evidence, asked), key=self._rank):
            judged += self.judge([first.candidate])
            if self.meets(judged[-1]):
                break
        return judged

    def _is_better(self, one: Candidate, best: Candidate, strain: Mapping[Candidate, float]) -> bool:
        """Whether it costs less, or as much and is predicted to do better."""
        if self._cost(one) == self._cost(best):
            return strain[one] < min(1.0, strain[best])
        return self._cost(one) < self._cost(best)

    def _next(
        self, left: Sequence[Candidate], strain: Mapping[Candidate, float], best: Candidate | None
    ) -> list[Candidate]:
        likely = sorted(
            (one for one in left if strain[one] <= 1.0), key=lambda one: (self._cost(one), strain[one], one)
        )
        if best is None and likely:
            return likely[:FEW_AT_ONCE]
        largest = [one for one in left if not any(one != other and one.has_at_most(other) for other in left)]
        return sorted(largest, key=lambda one: (strain[one], self._cost(one), one))[:AT_ONCE]

    # ------------------------------------------------------------ flags

    def _vary_flags(self) -> None:
        """Climb from near misses to candidates with other flags; a new best one is followed by cheaper numbers."""
        if not varies(self.trials.spec):
            return
        for _ in range(MOST_PASSES):
            before = self.found()
            for near in self._near_misses(before):
                self.say(f"flags of {near.candidate.shape}")
                self._climb(near)
            after = self.found()
            if after is None or after is before or (before and after.candidate == before.candidate):
                return
            self.say(f"fewer workers with the flags of {after.candidate.shape}")
            below = shapes(self.trials.spec, after.candidate.flags, one_pool=after.candidate.is_one_pool)
            self._cheapest([one for one in below if self._cost(one) < self._cost(after.candidate)])

    def _near_misses(self, best: Evidence | None) -> list[Evidence]:
        """The candidates that cost less than the best one and came nearest to the quantile, each shape once."""
        limit = self._cost(best.candidate) if best else math.inf
        least = self.trials.spec.goals.quantile - NEAR
        found: dict[tuple[int, int], Evidence] = {}
        for one in self.ranked():
            if not self.meets(one) and one.attainment >= least and self._cost(one.candidate) < limit:
                found.setdefault((one.candidate.num_prefill, one.candidate.num_decode), one)
        return list(found.values())[:NEAR_MISSES]

    def _climb(self, here: Evidence) -> None:
        """Change the flag that helps the most, until the goals are met or none helps."""
        for _ in range(MOST_PASSES):
            others = [plain(one, self.trials.spec) for one in neighbours(here.candidate, self.trials.spec)]
            found = self.judge(one for one in others if self.outlook.can_hold(one))
            next_best = min(found, key=lambda one: (-one.attainment, one.candidate), default=here)
            if next_best.attainment <= here.attainment + HELPS:
                return
            here = next_best
            if self.meets(here):
                return
