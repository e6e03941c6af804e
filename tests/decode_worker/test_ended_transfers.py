"""Transfers to a decode engine that do not complete: aborts, silence, and announcements of no request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from common.engine.worker.engine import RequestReceived
from common.wire.messages import AbortRequest, KVFailed, KVWait
from decode_worker import incoming_transfers

from ..engine_rig import prompt
from .transfer_phases import PHASES, Rig, in_state, transferring

# ---------------------------------------------------------------- aborts


def test_frames_after_an_abort_do_not_touch_who_came_next(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(num_blocks=4)
    transferring(engine, prompt(60))
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.until(lambda: engine.is_clean)
    assert isinstance(engine.peer.read(), KVFailed)
    engine.ask(prompt(40, 1), "b", max_tokens=20)
    engine.turn(3)
    engine.peer.ship(0, 4)
    engine.peer.done()
    engine.until(lambda: engine.is_clean and engine.engine.status.num_dropped_frames == 2)
    assert engine.tokens("b") == engine.oracle(prompt(40, 1), 20)


@pytest.mark.parametrize("state", PHASES)
def test_an_abort_releases_everything_and_tells_the_prefill_worker(make_engine: Callable[..., Rig], state: str) -> None:
    engine = make_engine(num_blocks=8)
    in_state(engine, state)
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.tell(AbortRequest(request_id="big", attempt=0))
    engine.until(lambda: engine.is_clean)
    assert not engine.failures()


def test_a_transfer_that_completes_during_the_abort_is_forgotten(engine: Rig) -> None:
    tokens = prompt(40)
    transferring(engine, tokens)
    engine.peer.ship(0, 3)
    engine.peer.done()
    assert engine.peer.socket.poll(60_000)  # acknowledged: the event waits in the engine's inbox
    engine.engine.apply(RequestReceived(b"router", AbortRequest(request_id="a", attempt=0)))
    engine.until(lambda: engine.is_clean)
    assert not engine.deltas() and not engine.failures()


# ---------------------------------------------------------------- silence


@pytest.mark.parametrize("state", PHASES)
def test_a_deadline_names_its_phase(make_engine: Callable[..., Rig], state: str) -> None:
    engine = make_engine(num_blocks=8)
    in_state(engine, state)
    engine.engine.scheduler.find("a").deadline = 0.0
    engine.later(0)
    assert [(f.phase, f.retryable) for f in engine.failures()] == [(PHASES[state], False)]


def test_no_room_is_said_to_the_prefill_worker_and_ends_in_time(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(num_blocks=8)
    in_state(engine, "opened")
    engine.later(2)
    assert isinstance(engine.peer.read(), KVWait)
    engine.later(31)
    assert isinstance(said_after_waiting(engine), KVFailed)
    assert [(f.phase, f.retryable) for f in engine.failures("a")] == [("grant", True)]
    assert "no free KV blocks for 40 tokens" in engine.failures("a")[0].message


def said_after_waiting(engine: Rig) -> Any:
    """A slow machine may have said meanwhile, in its own time, that there is no room."""
    while isinstance(message := engine.peer.read(), KVWait):
        pass
    return message


def test_a_stalled_transfer_fails_with_the_numbers(engine: Rig) -> None:
    transferring(engine, prompt(60))
    engine.peer.ship(0, 3)
    engine.received_blocks("a", 0, 3)
    engine.later(31)
    assert engine.is_clean
    assert "1 of 4 blocks missing" in engine.failures()[0].message and engine.failures()[0].retryable
    assert isinstance(engine.peer.read(), KVFailed)


def test_a_prefill_worker_that_says_it_computes_is_waited_for(engine: Rig) -> None:
    transferring(engine, prompt(60))
    transfer = engine.receiver._transfers[("a", 0)]
    before = transfer.last_progress = time.monotonic() - 15
    engine.peer.open("a", 4)
    engine.until(lambda: transfer.last_progress > before)
    engine.later(20)
    assert not engine.failures()


def test_a_prefill_worker_that_reconnects_may_have_lost_frames(engine: Rig) -> None:
    transferring(engine, prompt(60))
    other = engine.another_peer()
    other.open("a", 4)
    engine.until(lambda: engine.is_clean)
    assert "reconnected" in engine.failures()[0].message
    assert isinstance(other.read(), KVFailed)


def test_who_announced_nothing_cannot_give_up(engine: Rig) -> None:
    """It may be anybody: a prefill worker that failed before it announced anything tells the router."""
    tokens = prompt(40)
    engine.ask(tokens, remote=True)
    engine.turn()
    engine.peer.send(KVFailed(request_id="a", attempt=0, reason="forged"))
    engine.ship(tokens, engine.granted(tokens))
    engine.until(engine.reason)
    assert engine.tokens() == engine.oracle(tokens) and not engine.failures()


@pytest.mark.parametrize("state", [state for state in PHASES if state != "expecting"])
def test_a_prefill_worker_that_gives_up_fails_the_request(make_engine: Callable[..., Rig], state: str) -> None:
    engine = make_engine(num_blocks=8)
    in_state(engine, state)
    engine.peer.send(KVFailed(request_id="a", attempt=0, reason="lease expired"))
    engine.until(lambda: engine.failures())
    assert (engine.failures()[0].phase, engine.failures()[0].retryable) == ("transfer", True)
    assert engine.engine.scheduler.find("a") is None


def test_giving_up_late_harms_nobody(engine: Rig) -> None:
    tokens = prompt(40)
    engine.ship(tokens, transferring(engine, tokens))
    engine.peer.send(KVFailed(request_id="a", attempt=0, reason="late"))
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(tokens) and not engine.failures()


# ---------------------------------------------------------------- announcements without a request


def test_an_announcement_nobody_asked_for_is_refused_in_time(engine: Rig) -> None:
    engine.peer.open("unknown", 3)
    engine.until(lambda: engine.engine._transfers.incoming._early)
    engine.later(incoming_transfers.EARLY_OPEN_S + 1)
    assert "unknown request" in engine.peer.read().reason


def test_a_refused_request_refuses_its_announcement(engine: Rig) -> None:
    engine.peer.open("a", 3)
    engine.until(lambda: engine.engine._transfers.incoming._early)
    engine.ask([999] * 40, remote=True)
    engine.until(lambda: engine.failures())
    assert "outside of the vocabulary" in engine.peer.read().reason


def test_an_announcement_taken_back_is_forgotten(engine: Rig) -> None:
    engine.peer.open("a", 3)
    engine.until(lambda: engine.engine._transfers.incoming._early)
    engine.peer.send(KVFailed(request_id="a", attempt=0, reason="aborted"))
    engine.until(lambda: not engine.engine._transfers.incoming._early)
    assert not engine.peer.socket.poll(0)


def test_announcements_nobody_asked_for_are_bounded(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_transfers, "MAX_EARLY_OPENS", 4)
    for number in range(6):
        engine.peer.open(f"unknown{number}", 1)
    engine.until(lambda: len(engine.engine._transfers.incoming._early) == 4 and engine.peer.socket.poll(0))
    assert engine.peer.read().request_id == "unknown0"
