"""Runs simulations in a pool of processes, each once, and keeps what they found."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.plan.candidate import Candidate, scenario
from benchmarks.plan.evidence import Evidence, Trial
from benchmarks.plan.spec import PlanGoals, PlanSpec
from benchmarks.simulator.report import Findings
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.scenario import Scenario

TRIAL_LIMIT_S = 3600.0
"""A simulation that takes longer, in real time, ends the command."""


@dataclass(frozen=True, slots=True)
class Question:
    """One run: a candidate with a seed, at so many times the load, for these goals."""

    candidate: Candidate
    seed: int
    load_factor: float
    goals: PlanGoals


def run_trial(made: Scenario, progress: Callable[[int, float], None] = lambda num_over, now: None) -> Trial:
    """Simulate one scenario. Raises ConfigError, TraceError, and what `progress` raises to end the simulation."""
    run = Simulation(made).run(progress)
    found, goals = Findings.of(run), made.goals
    served = [request for request in run.requests if request.outcome == "ok"]
    ttft_s = tuple(request.ttft_s for request in served)
    tpot_s = tuple(request.tpot_s for request in served if not math.isnan(request.tpot_s))
    return Trial(
        seed=made.seed,
        num_requests=found.num_requests,
        num_good=found.num_good,
        num_refused=found.num_refused,
        num_failed=found.num_failed,
        num_late_first=sum(value * 1e3 > goals.ttft_ms > 0.0 for value in ttft_s),
        num_late_tokens=sum(value * 1e3 > goals.tpot_ms > 0.0 for value in tpot_s),
        num_tokens=sum(request.num_tokens for request in served),
        seconds=made.duration_s or max(1.0, run.requests[-1].arrival_s),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


class Trials:
    """Answers questions with up to `jobs` processes; `on_done` hears of each new trial. To be used with `with`."""

    def __init__(
        self,
        spec: PlanSpec,
        *,
        jobs: int = 1,
        on_done: Callable[[Question, Trial], None] | None = None,
        simulate: Callable[[Scenario], Trial] = run_trial,
    ) -> None:
        """`simulate` runs in another process when there are several jobs."""
        self.spec, self.num_run, self._simulate = spec, 0, simulate
        self._jobs, self._on_done = jobs, on_done or (lambda question, trial: None)
        self._known: dict[Question, Trial] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def run(self, questions: Iterable[Question]) -> None:
        """Run what is not known yet. Raises ConfigError, TraceError, and TimeoutError after an hour."""
        new = [question for question in dict.fromkeys(questions) if question not in self._known]
        made = [self._scenario(question) for question in new]
        if self._jobs > 1 and len(new) > 1:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")  # a forked child would inherit threads' locks
                self._pool = ProcessPoolExecutor(self._jobs, mp_context=context)
            found = self._pool.map(self._simulate, made, timeout=TRIAL_LIMIT_S)
        else:
            found = map(self._simulate, made)
        for question, trial in zip(new, found, strict=True):
            self._known[question] = trial
            self.num_run += 1
            self._on_done(question, trial)

    def evidence(self, candidate: Candidate, *, load_factor: float = 1.0, goals: PlanGoals | None = None) -> Evidence:
        """All runs of a candidate so far, by seed; raises KeyError when there is none."""
        goals = goals or self.spec.goals
        seeds = (self.spec.seed + number for number in range(self.spec.search.seeds))
        questions = (Question(candidate, seed, load_factor, goals) for seed in seeds)
        trials = tuple(self._known[question] for question in questions if question in self._known)
        if not trials:
            raise KeyError(candidate)
        return Evidence(candidate, trials)

    def all_evidence(self) -> list[Evidence]:
        """Of every candidate that ran with the load and goals of the plan."""
        goals = self.spec.goals
        asked = [one.candidate for one in self._known if one.load_factor == 1.0 and one.goals == goals]
        return [self.evidence(candidate) for candidate in dict.fromkeys(asked)]

    def _scenario(self, question: Question) -> Scenario:
        return scenario(
            self.spec, question.candidate, question.seed, load_factor=question.load_factor, goals=question.goals
        )
