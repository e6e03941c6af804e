"""A plan says how far the candidates fall short where none meets the goals."""

from __future__ import annotations

import pytest

from benchmarks.plan.candidate import Flags
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.reach import reach
from benchmarks.plan.report import Plan, as_json, sentences
from benchmarks.plan.search import Search
from benchmarks.plan.trials import Trials
from benchmarks.simulator.world.scenario import Scenario

from .conftest import make_spec, search_of


def slow_at(p: int, d: int, flags: Flags, made: Scenario) -> float:
    """A service that meets 1,200 ms, or two fifths of the load, with at least two prefill workers."""
    meets = made.goals.ttft_ms >= 1200 or made.load.rate <= 2.0
    return (0.97 if meets else 0.8) - (0.0 if p >= 2 else 0.1)


def test_the_largest_load_and_the_tightest_goal_are_found() -> None:
    search = search_of(make_spec(), slow_at, lambda candidate: 2.0)
    assert search.best() is None
    found = reach(search)
    assert found.best.candidate.num_prefill >= 2
    assert found.load is not None and found.load.load_factor == pytest.approx(0.4, rel=0.06)
    assert found.ttft is not None and found.ttft.goals.ttft_ms == pytest.approx(1200, rel=0.06)
    assert found.ttft.goals.tpot_ms == 30.0
    assert found.tpot is None and found.both is None
    text = " ".join(sentences(Plan(search, None, found)))
    assert "No candidate meets TTFT 500 ms and TPOT 30 ms for 95% of requests within the bounds (at most 4" in text
    assert "2P + " in text and "TPOT: a looser goal for it alone does not help" in text


def test_where_only_both_goals_together_can_be_loosened_both_are() -> None:
    def attained(p: int, d: int, flags: Flags, made: Scenario) -> float:
        return 1.0 if made.goals.ttft_ms >= 900 and made.goals.tpot_ms >= 54 else 0.1

    search = search_of(make_spec(), attained, lambda candidate: 2.0)
    assert search.best() is None
    found = reach(search)
    assert found.load is None and found.ttft is None and found.tpot is None
    assert found.both is not None and found.both.goals.ttft_ms == pytest.approx(900, rel=0.06)
    assert as_json(Plan(search, None, found), {})["reach"]["both"]["goals"]["tpot_ms"] >= 54


@pytest.mark.slow
def test_a_goal_that_no_number_of_workers_meets_is_named_with_the_best_possible() -> None:
    spec = make_spec(
        goals={"tpot_ms": 5.0, "ttft_ms": 0.0}, bounds={"max_workers": 2}, duration_s=2.0, load={"rate": 3.0}
    )
    with Trials(spec) as trials:
        search = Search(trials, Outlook(spec))
        assert search.best() is None
        found = reach(search)
        lines = sentences(Plan(search, None, found))
    assert any("No number of workers meets the TPOT: a lone sequence takes 11.1 ms" in line for line in lines)
    assert found.tpot is not None and 11.0 < found.tpot.goals.tpot_ms < 14.0


def test_nothing_judged_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        reach(search_of(make_spec(), slow_at))
