"""What `diptych explain` says about a routing decision."""

from __future__ import annotations

from typing import Any

from router.policy.decision import MAX_CANDIDATES, reason, shortened, weighed

from .test_routing import choose, pool


def test_a_decision_names_its_candidates_and_its_reason() -> None:
    registry: Any = pool(prefill=2, decode=2)
    registry.workers["p0"].bookings.num_dispatched = 3
    choice = choose(registry)
    found = list(weighed(choice))
    assert [(one.worker, one.is_chosen) for one in found] == [("p1", True), ("p0", False), ("d0", True), ("d1", False)]
    assert found[0].forecast.prompt_s > 0 and found[2].forecast.token_s > 0
    assert reason(choice).startswith("p1 is the least loaded of those with about equal predicted costs (")


def test_a_cheaper_worker_is_told_from_an_equal_one() -> None:
    told = reason(choose(pool(prefill=2, decode=1), hits={"p1": 480}))
    assert told.startswith("p1 has the lowest predicted cost (") and "next p0" in told
    assert told.endswith("d0 was the only decode candidate.")


def test_who_computes_the_prompt_is_told() -> None:
    assert "d0 computes the prompt itself (predicted cost" in reason(choose(pool(), num_tokens=64))
    assert "d0 computes the prompt: no prefill worker could take it." in reason(choose(pool(prefill=0)))


def test_a_large_pool_is_shortened_and_keeps_the_chosen() -> None:
    choice = choose(pool(prefill=20, decode=1))
    kept = shortened(choice)
    assert [len(one.prefill) for one in kept.considered] == [MAX_CANDIDATES]
    assert reason(kept) == reason(choice) and next(iter(weighed(kept))).is_chosen
    assert shortened(kept) is kept
