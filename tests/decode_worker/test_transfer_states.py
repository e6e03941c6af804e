"""Prefill and decode engines joined by the real wire, under any order of what can happen to a transfer.

The test turns the engines' loops; the threads that send and receive run as they like. Whatever happens, every block has
its owner, each attempt ends exactly once, tokens are those of an undisturbed run, every published block holds the KV of
the tokens that its hash stands for, and in the end nothing is left.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.transfer import shipping
from common.wire.messages import (
    ResetPrefixCache,
)
from common.worker.engine import RequestReceived, RouterLost

from ..examples import examples
from .transfer_fleet import NUM_TOKENS, ROUTER, Asked, Fleet, Rig, runner_of

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    fleet = Fleet(make_engine, num_blocks=16)
    send = shipping.try_send_blocks

    def checked(stream: Any, request_id: str, attempt: int, first: int, views: Any, *rest: Any) -> bool:
        fleet.check_lent(request_id, views)
        return send(stream, request_id, attempt, first, views, *rest)

    monkeypatch.setattr(shipping, "try_send_blocks", checked)
    yield fleet
    fleet.settle()
    fleet.close()


class Story:
    """One run of events on a fleet that the runs before have left empty."""

    count = 0

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.source = fleet, random.Random(seed)
        self.asked: list[Asked] = []
        for sent in (fleet.sent, *(rig.sent for rig in fleet.decode)):
            sent.clear()

    def happen(self, event: str) -> None:
        live = [asked for asked in self.asked if not asked.over]
        if event == "ask" or not live:
            self.begin()
            return
        asked = self.source.choice(live)
        match event:
            case "again":  # the router found another prefill worker, or none
                if not asked.handed and not self.fleet.ended(asked):
                    asked.attempt += 1
                    self.fleet.ask(asked, remote=self.source.random() < 0.7)
            case "twice":
                if not asked.handed and not self.fleet.ended(asked):
                    self.fleet.ask(asked, remote=True)
            case "hand over":
                for one in live:
                    self.fleet.hand_over(one)
            case "abort":
                asked.over = True
                self.fleet.abort(asked, self.fleet.engines)
            case "abort prefill":  # the decode engine is left to find out, and told later
                asked.over = True
                self.fleet.abort(asked, [self.fleet.prefill])
                self.fleet.turn(self.source, 6)
                self.fleet.abort(asked, self.fleet.engines)
            case "lose router":
                for other in live:
                    other.over = True
                for engine in self.fleet.engines:
                    engine.notify(RouterLost(ROUTER))
            case "stall":  # no block came for longer than allowed
                for rig in self.fleet.decode:
                    rig.later(31.0)
            case "reset":
                for engine in self.fleet.engines:
                    engine.submit(RequestReceived(ROUTER, ResetPrefixCache(request_id="reset")))
            case "fail":
                self.fail_a_step()
            case "crowd":
                self.crowd()
            case "turn":
                self.fleet.turn(self.source, self.source.randrange(1, 20))

    def begin(self) -> None:
        self.ask(self.source.randrange(1, 110), self.source.randrange(2), remote=self.source.random() < 0.8)

    def ask(self, length: int, place: int, *, remote: bool) -> Asked:
        Story.count += 1
        asked = Asked(f"r{Story.count}", [self.source.randrange(1, 255) for _ in range(length)])
        asked.place = place
        self.asked.append(asked)
        self.fleet.learn(asked.tokens + self.fleet.decode[0].oracle(asked.tokens, NUM_TOKENS, ignore_eos=True))
        self.fleet.ask(asked, remote=remote)
        return asked

    def crowd(self) -> None:
        """Three sequences that together outgrow their worker; they are handed over about when one is preempted."""
        place = self.source.randrange(2)
        engine = self.fleet.decode[place].engine
        three = [self.ask(self.source.randrange(66, 80), place, remote=False) for _ in range(3)]
        for _ in range(60):
            if engine.scheduler.lacks_blocks:
                break
            engine._turn()
        for one in three:
            self.fleet.hand_over(one)
        self.fleet.linger = 40
        for _ in range(4):
            engine._turn()
        self.fleet.linger = 1

    def fail_a_step(self) -> None:
        engine, device = self.source.choice(self.fleet.engines), self.fleet.device
        if engine is self.fleet.decode[1].engine:
            device.fail_full = True
            return
        forward = runner_of(engine).forward

        def raise_once(*arguments: object) -> None:
            runner_of(engine).forward = forward
            raise RuntimeError("scripted")

        runner_of(engine).forward = raise_once
        engine._turn()
        runner_of(engine).forward = forward

    def end(self) -> None:
        """Let everything run out, and look at what came of it."""
        self.fleet.settle(self.asked)
        for asked in self.asked:
            expected = self.fleet.decode[0].oracle(asked.tokens, NUM_TOKENS, ignore_eos=True)
            for attempt in range(asked.attempt + 2):
                deltas = self.fleet.deltas(asked, attempt)
                for delta in deltas:
                    assert delta.token_ids == tuple(expected[delta.index : delta.index + len(delta.token_ids)])
                assert sum(bool(delta.finish_reason) for delta in deltas) <= 1
            if not asked.over:
                assert self.finished(asked) or self.failed(asked)

    def finished(self, asked: Asked) -> bool:
        attempts = (asked.attempt, asked.attempt + 1)  # the second is a hand-over's
        return any(delta.finish_reason == "length" for a in attempts for delta in self.fleet.deltas(asked, a))

    def failed(self, asked: Asked) -> bool:
        return any(self.fleet.failures(asked, attempt) for attempt in (asked.attempt, asked.attempt + 1))


EVENTS = (
    *("ask", "again", "twice", "hand over", "abort", "abort prefill", "lose router", "stall", "reset", "fail"),
    *("turn",) * 8,
    *("ask",) * 2,
    *("hand over",) * 2,
    "fail",
)
ORDERS = settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(12),
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def tell(fleet: Fleet, seed: int, events: list[str]) -> None:
    story = Story(fleet, seed)
    for event in events:
        story.happen(event)
        fleet.check()
        fleet.check_published()
    story.end()
    fleet.check_published()
    for engine in fleet.engines:
        assert engine.check_integrity().owned == 0


@pytest.mark.timeout(300)  # its waits are real
@given(seed=st.integers(0, 2**32), events=st.lists(st.sampled_from(EVENTS), min_size=5, max_size=40))
@ORDERS
def test_any_order_of_events_leaves_the_right_tokens_and_nothing_else(
    fleet: Fleet, seed: int, events: list[str]
) -> None:
    tell(fleet, seed, events)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_preempted_while_it_leaves_is_shipped_no_more(fleet: Fleet, seed: int) -> None:
    source = random.Random(seed)
    tell(fleet, seed, [*source.choices(("turn", "fail", "abort", "ask"), k=source.randrange(4)), *["crowd"] * 3])
