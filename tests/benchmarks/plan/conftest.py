"""Small plans, and simulations that are formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.plan.candidate import Candidate, Flags
from benchmarks.plan.evidence import Trial
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.search import Search
from benchmarks.plan.spec import PlanSpec, merged, spec_of
from benchmarks.plan.trials import Trials
from benchmarks.simulator.world.scenario import Scenario

PREFILL = {"fixed_s": 0.004, "floor_s": 0.008, "token_s": 4e-5, "pair_s": 1e-9}
DECODE = {"fixed_s": 0.011, "token_s": 4e-5, "pair_s": 1e-9, "row_s": 1e-4, "context_s": 4e-8}
NUM = 1000


def make_values(**more: Any) -> dict[str, Any]:
    """Five requests a second for eight seconds on at most four workers."""
    values = {
        "duration_s": 8.0,
        "goals": {"ttft_ms": 500.0, "tpot_ms": 30.0},
        "load": {"rate": 5.0, "input_len": "100-1500", "output_len": "10-60"},
        "model": {"max_model_len": 8192},
        "prefill": {"coefficients": PREFILL, "num_blocks": 4096},
        "decode": {"coefficients": DECODE, "num_blocks": 4096},
        "bounds": {"max_workers": 4},
        "search": {"seeds": 3},
    }
    return merged(values, more)


def make_spec(**more: Any) -> PlanSpec:
    return spec_of(make_values(**more))


Attained = Callable[[int, int, Flags, Scenario], float]


def trial_of(attained: Attained) -> Callable[[Scenario], Trial]:
    """A simulation whose attainment is a formula of the pools, flags and scenario."""

    def simulate(made: Scenario) -> Trial:
        prefill, decode = made.pool
        flags = Flags(
            made.settings["local_prefill_threshold"],
            prefill.max_step_tokens,
            decode.max_num_seqs,
            decode.max_step_tokens,
        )
        num_good = round(NUM * min(1.0, max(0.0, attained(prefill.count, decode.count, flags, made))))
        return Trial(made.seed, NUM, num_good, NUM - num_good, 0, 0, 0, NUM * 10, 60.0, (0.1,) * 3, (0.01,) * 3)

    return simulate


class Guesses(Outlook):
    """Formulas that let every candidate pass, and order candidates by `strain` alone."""

    def __init__(self, spec: PlanSpec, strain: Callable[[Candidate], float] = lambda candidate: 1.0) -> None:
        super().__init__(spec)
        self._strain = strain

    def can_hold(self, candidate: Candidate) -> bool:
        return True

    def strain(self, candidate: Candidate) -> float:
        return self._strain(candidate)


def search_of(
    spec: PlanSpec, attained: Attained, strain: Callable[[Candidate], float] = lambda candidate: 1.0
) -> Search:
    return Search(Trials(spec, simulate=trial_of(attained)), Guesses(spec, strain))


@pytest.fixture
def spec() -> Callable[..., PlanSpec]:
    return make_spec


@pytest.fixture
def values() -> Callable[..., dict[str, Any]]:
    return make_values
