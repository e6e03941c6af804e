"""Formulas exclude only what cannot hold a load, and say what a plan is likely to need."""

from __future__ import annotations

import pytest

from benchmarks.plan.candidate import Candidate, Flags
from benchmarks.plan.outlook import Outlook, sampled
from benchmarks.plan.reach import reach
from benchmarks.plan.search import Search
from benchmarks.plan.trials import Trials
from benchmarks.simulator.world.load import SimulatedRequest
from benchmarks.simulator.world.tokens import Content

from .conftest import make_spec, trial_of

FLAGS = Flags(64, 512, 64, 128)


def test_too_little_time_or_memory_is_excluded() -> None:
    prompts = {"input_len": "1000", "output_len": "2", "rate": 60.0}  # 40 ms each: 2.4 workers, and 5 % may miss
    outlook = Outlook(make_spec(load=prompts))
    held = [outlook.can_hold(Candidate(p, 1, FLAGS)) for p in (0, 1, 2, 3)]
    assert held == sorted(held) and (held[0], held[3]) == (False, True)
    tokens = {"input_len": "20", "output_len": "200", "rate": 28.0}  # steps of 18 ms with 64 rows: 1.6 workers
    outlook = Outlook(make_spec(load=tokens, duration_s=60.0))
    assert [outlook.can_hold(Candidate(2, d, FLAGS)) for d in (1, 2)] == [False, True]
    outlook = Outlook(
        make_spec(load={"input_len": "1000", "output_len": "200", "rate": 5.0}, decode={"num_blocks": 64})
    )
    assert not outlook.can_hold(Candidate(2, 2, FLAGS))


def test_without_both_goals_time_excludes_nothing() -> None:
    assert Outlook(make_spec(goals={"tpot_ms": 0.0}, load={"rate": 500.0})).can_hold(Candidate(0, 1, FLAGS))


def test_strain_falls_with_more_workers_and_what_is_used_is_named() -> None:
    outlook = Outlook(make_spec(load={"rate": 20.0}))
    strains = [outlook.strain(Candidate(p, 2, FLAGS)) for p in (1, 2, 3)]
    assert strains == sorted(strains, reverse=True) and strains[-1] <= 1.0
    assert outlook.binding(Candidate(1, 2, FLAGS)).startswith("prefill time")
    assert Outlook(make_spec(load={"rate": 300.0})).binding(Candidate(0, 1, FLAGS)) == "decode time: too little"


def test_the_best_that_any_number_of_workers_can_do() -> None:
    outlook = Outlook(make_spec(load={"input_len": "1000", "output_len": "50"}))
    assert outlook.best_ttft_ms == pytest.approx(1e3 * (2 * 0.004 + 1000 * 4e-5 + 1e6 * 1e-9), rel=0.01)
    assert outlook.best_tpot_ms == pytest.approx(1e3 * (0.011 + 1e-4 + 1025 * 4e-8), rel=0.01)


def test_shared_prefixes_count_once() -> None:
    contents = [
        Content(0, 1000, ids=(1, 2), id_tokens=512),
        Content(1, 1100, ids=(1, 2, 3), id_tokens=512),
        Content(2, 600, ids=(1, 9), id_tokens=512),
        Content(3, 600, copy=1, ids=(1, 9), id_tokens=512),
        Content(4, 512, ids=(1,), id_tokens=512),
    ]
    requests = [SimulatedRequest(content.number, float(content.number), 5, content) for content in contents]
    assert [one.num_cached for one in sampled(requests)] == [0, 1024, 512, 0, 511]


def test_bursts_raise_the_rate_that_is_planned_for() -> None:
    steady = Outlook(make_spec(duration_s=100.0)).offered
    bursts = make_spec(duration_s=100.0, load={"rate": 0.0, "rates": [[0, 1.0], [80, 21.0]]})
    assert steady.rate == pytest.approx(5.0, rel=0.25)
    assert Outlook(bursts).offered.rate > 2 * steady.rate


def test_a_load_that_formulas_exclude_everywhere_still_gets_an_answer() -> None:
    spec = make_spec(load={"rate": 400.0}, duration_s=2.0)
    search = Search(
        Trials(spec, simulate=trial_of(lambda p, d, flags, made: 4.0 * (p + d) / made.load.rate)), Outlook(spec)
    )
    assert not any(search.outlook.can_hold(Candidate(p, 4 - p, FLAGS)) for p in range(4))
    assert search.best() is None
    found = reach(search)
    assert found.load is not None and found.load.load_factor == pytest.approx(0.042, rel=0.06)


def test_a_slow_link_binds() -> None:
    slow = {"link_rate": 1e6}
    outlook = Outlook(make_spec(prefill=slow, decode=slow, model={"kv_bytes_per_token": 1000}))
    assert outlook.used(Candidate(1, 1, FLAGS))["transfer"] == pytest.approx(5.0 * 800 * 1000 / 1e6, rel=0.5)
    assert "transfer" not in outlook.used(Candidate(0, 1, FLAGS))
    assert outlook.binding(Candidate(1, 1, FLAGS)).startswith("transfer")
