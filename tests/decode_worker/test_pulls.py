"""A decode engine that computes prompts itself, with blocks that another one has cached: the same answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from common.wire.messages import AbortRequest

from ..engine_rig import as_peer, prompt
from ..waiting import wait_until

pytestmark = pytest.mark.slow

Rig = Any  # EngineRig of conftest, which test modules cannot import
FIRST = prompt(40)


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model computes a block in less time than a pull takes."""
    monkeypatch.setattr("common.engine.sequences.restores.WORTHWHILE", math.inf)


@pytest.fixture
def make(make_engine: Callable[..., Rig]) -> Callable[..., Rig]:
    return lambda **options: make_engine(lends=True, **options)


def peer_of(rig: Rig, num_blocks: int = 1000) -> Any:
    return as_peer(rig.caches, ("d", 7), num_blocks)


def pulled_tokens(rig: Rig) -> float:
    hits = rig.engine.metrics._tier_hits
    return sum(s.value for m in hits.collect() for s in m.samples if s.labels.get("tier") == "peer")


def test_a_next_turn_pulls_the_answer_before_it(make: Callable[..., Rig]) -> None:
    holder, other = make(), make()
    holder.ask(FIRST, "first", max_tokens=40)
    holder.until(lambda: holder.is_clean)
    turn = [*FIRST, *other.oracle(FIRST, 40), 5]
    other.ask(turn, "next", max_tokens=10, peer=peer_of(holder))
    other.until(lambda: other.is_clean)
    assert other.tokens("next") == other.oracle(turn, 10)
    assert other.deltas("next")[-1].num_cached_tokens == 64


def test_the_true_tokens_whatever_is_preempted_aborted_or_pulled(make: Callable[..., Rig]) -> None:
    """Of prompts that begin alike."""
    holder, other = make(num_blocks=64), make(num_blocks=14)
    holder.mix(1)
    other.mix(2, peer=peer_of(holder))
    assert pulled_tokens(other) > 0
    wait_until(lambda: not other.caches.puller._pulls)


def test_a_lender_s_evictions_make_no_wrong_token(make: Callable[..., Rig]) -> None:
    """Both engines work at once: what is pulled is evicted and written to while it travels."""
    holder, other = make(num_blocks=14), make(num_blocks=20)
    for number in range(12):
        tokens, name = prompt(60, number), f"r{number}"
        holder.ask(tokens, name, max_tokens=4)
        other.ask(tokens, name, max_tokens=4, peer=peer_of(holder))
        for _ in range(4):
            holder.turn()
            other.turn()
        if number % 4 == 3:
            other.tell(AbortRequest(request_id=name, attempt=0))
    for rig in (holder, other):
        rig.until(lambda rig=rig: rig.is_clean)
    for number in range(12):
        expected = other.oracle(prompt(60, number), 4)
        assert holder.tokens(f"r{number}") == expected
        found = other.tokens(f"r{number}")
        assert found == (expected if number % 4 != 3 else expected[: len(found)])
