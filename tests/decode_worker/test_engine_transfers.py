"""The decode engine and KV from prefill workers that the test plays: right tokens, or a failure that says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from common.engine.transfer import incoming
from common.engine.worker.contract import RequestReceived
from common.wire.messages import AbortRequest, KVAck, KVFailed, KVWait
from decode_worker.sequence import RequestStatus

from ..engine_rig import prompt

Rig = Any  # EngineRig of conftest, which test modules cannot import
PHASES = {"expecting": "queue", "opened": "grant", "transferring": "transfer"}


def transferring(engine: Rig, tokens: list[int], name: str = "a", **options: Any) -> int:
    """A request with its grant: the first block that is missing."""
    engine.ask(tokens, name, remote=True, **options)
    return int(engine.granted(tokens, name))


def in_state(engine: Rig, state: str) -> None:
    """Bring request "a" into a state on a pool of eight blocks."""
    if state == "opened":
        transferring(engine, prompt(100, 1), "big")
    engine.ask(prompt(40), remote=True)
    engine.turn()
    if state != "expecting":
        engine.peer.open("a", 3)
        engine.until(lambda: engine.engine.scheduler.find("a").status.value == state)


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 50])
def test_tokens_equal_the_oracle(engine: Rig, length: int) -> None:
    tokens = prompt(length)
    engine.ship(tokens, transferring(engine, tokens))
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(tokens)


def test_the_first_delta_repeats_the_first_token_once(engine: Rig) -> None:
    tokens = prompt(40)
    engine.ship(tokens, transferring(engine, tokens))
    engine.until(lambda: engine.is_clean)
    assert [(delta.index, len(delta.token_ids)) for delta in engine.deltas()][:2] == [(0, 2), (2, 1)]


def test_the_announcement_may_come_first(engine: Rig) -> None:
    tokens = prompt(40)
    engine.compute(tokens)
    engine.peer.open("a", 3)
    engine.until(lambda: engine.engine._transfers.incoming._early)
    engine.ask(tokens, remote=True)
    engine.until(lambda: engine.peer.socket.poll(0))
    engine.ship(tokens, engine.peer.read().first_block)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(tokens)


def test_only_missing_blocks_are_granted_and_answers_are_cached_too(engine: Rig) -> None:
    first = prompt(30)
    engine.ship(first, transferring(engine, first, max_tokens=20), max_tokens=20)
    engine.until(lambda: engine.is_clean)
    second = first + engine.tokens() + prompt(20, 1)
    assert transferring(engine, second, "b") == 3
    engine.ship(second, 3, "b")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("b") == engine.oracle(second)


def test_a_full_hit_needs_no_block(engine: Rig) -> None:
    tokens = prompt(32)
    engine.ask(tokens, "first")
    engine.until(lambda: engine.is_clean)
    assert transferring(engine, tokens) == 2
    engine.ship(tokens, 2)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(tokens)


@pytest.mark.parametrize(
    ("params", "reason"), [({"max_tokens": 1}, "length"), ({"stop_token_ids": tuple(range(261))}, "stop")]
)
def test_a_request_may_end_as_it_arrives(engine: Rig, params: dict[str, Any], reason: str) -> None:
    tokens = prompt(40)
    engine.ship(tokens, transferring(engine, tokens, **params))
    engine.until(lambda: engine.is_clean)
    assert (engine.tokens(), engine.reason()) == (engine.oracle(tokens, 1), reason)


def test_many_transfers_and_local_prefills_share_a_small_pool(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(num_blocks=12, max_num_seqs=4, watermark=0.1)
    prompts = {f"r{seed}": prompt(20 + seed, seed) for seed in range(10)}
    waiting = []
    for number, (name, tokens) in enumerate(prompts.items()):
        engine.ask(tokens, name, remote=number % 2 == 0, max_tokens=25)
        if number % 2 == 0:
            peer = engine.another_peer()
            engine.compute(tokens, peer)
            peer.open(name, len(peer.blocks))
            waiting.append((name, tokens, peer))
    for name, tokens, peer in waiting:
        engine.until(lambda peer=peer: peer.socket.poll(0))
        grant = peer.read()
        while isinstance(grant, KVWait):
            engine.until(lambda peer=peer: peer.socket.poll(0))
            grant = peer.read()
        engine.ship(tokens, grant.first_block, name, peer=peer)
    engine.until(lambda: engine.is_clean)
    for name, tokens in prompts.items():
        assert engine.tokens(name) == engine.oracle(tokens, 25)


# ---------------------------------------------------------------- attempts


def test_a_new_attempt_keeps_what_has_arrived(engine: Rig) -> None:
    tokens = prompt(70)
    transferring(engine, tokens)
    engine.peer.ship(0, 2)
    engine.peer.ship(3, 1)
    engine.received_blocks("a", 0, 3)
    engine.ask(tokens, attempt=1, remote=True)
    other = engine.another_peer()
    assert engine.granted(tokens, attempt=1, peer=other) == 2
    assert engine.peer.read().reason == "superseded by a new attempt"
    engine.ship(tokens, 2, attempt=1, peer=other)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(tokens)


def test_a_new_attempt_without_prefill_worker_computes_the_rest_here(engine: Rig) -> None:
    tokens = prompt(70)
    transferring(engine, tokens)
    engine.peer.ship(0, 2)
    engine.received_blocks("a", 0, 2)
    engine.ask(tokens, attempt=1)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(tokens)
    assert engine.deltas(attempt=1)[0].num_cached_tokens == 32


@pytest.mark.parametrize("end", ["abort", "silence"])
def test_what_has_arrived_is_cached_when_the_rest_does_not_come(engine: Rig, end: str) -> None:
    tokens = prompt(70)
    transferring(engine, tokens)
    engine.peer.ship(0, 2)
    engine.peer.ship(3, 1)
    engine.received_blocks("a", 0, 3)
    if end == "abort":
        engine.tell(AbortRequest(request_id="a", attempt=0))
    else:
        engine.later(31)
    engine.until(lambda: engine.is_clean)
    assert engine.engine.check_integrity().cached == 2
    engine.ask(tokens, "again")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("again") == engine.oracle(tokens)
    assert engine.deltas("again")[0].num_cached_tokens == 32


def test_nothing_is_kept_of_what_its_sender_gave_up(engine: Rig) -> None:
    tokens = prompt(70)
    transferring(engine, tokens)
    engine.peer.ship(0, 2)
    engine.received_blocks("a", 0, 2)
    engine.peer.send(KVFailed(request_id="a", attempt=0, reason="its step failed"))
    engine.until(lambda: engine.is_clean)
    assert engine.engine.check_integrity().cached == 0
    engine.ask(tokens, "again")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("again") == engine.oracle(tokens)


def test_a_request_whose_prefill_worker_is_replaced_waits_for_the_next_one_not_for_room(
    make_engine: Callable[..., Rig],
) -> None:
    engine = make_engine(num_blocks=6)
    tokens = prompt(40)
    engine.ask(prompt(60, 9), "b", max_tokens=30)
    engine.until(lambda: len(engine.tokens("b")) > 1)
    engine.ask(tokens, remote=True)
    engine.peer.open("a", 3)
    engine.gently(lambda: engine.engine.scheduler.queue)
    engine.ask(tokens, attempt=1, remote=True)  # the prefill worker died; the next one has a long queue
    engine.turn(2)
    engine.tell(AbortRequest(request_id="b", attempt=0))
    engine.turn(4)
    assert engine.engine.scheduler.find("a").status is RequestStatus.EXPECTING
    assert engine.engine.check_integrity().owned == 0
    engine.later(31)
    assert not engine.failures("a")
    other = engine.another_peer()
    engine.ship(tokens, engine.granted(tokens, attempt=1, peer=other), attempt=1, peer=other)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(tokens)


def test_a_new_attempt_before_any_grant(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(num_blocks=8)
    transferring(engine, prompt(100, 1), "big")
    engine.ask(prompt(40), remote=True)
    engine.peer.open("a", 3)
    engine.until(lambda: engine.engine.scheduler.queue)
    engine.ask(prompt(40), attempt=1, remote=True)
    engine.tell(AbortRequest(request_id="big", attempt=0))
    other = engine.another_peer()
    assert engine.granted(prompt(40), attempt=1, peer=other) == 0
    engine.ship(prompt(40), 0, attempt=1, peer=other)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(prompt(40))


@pytest.mark.parametrize("early", [False, True])
def test_a_prefill_worker_that_is_not_needed_hears_so(engine: Rig, early: bool) -> None:
    engine.ask(prompt(40), max_tokens=400)
    engine.turn(4)
    if early:
        engine.peer.open("a", 3, attempt=1)
        engine.gently(lambda: engine.engine._transfers.incoming._early)
    engine.ask(prompt(40), attempt=1, remote=True, max_tokens=400)
    if not early:
        engine.peer.open("a", 3, attempt=1)
    engine.gently(lambda: engine.peer.socket.poll(0))
    assert engine.peer.read() == KVAck(request_id="a", attempt=1)
    assert not engine.failures()


def test_an_older_attempts_announcement_is_refused(engine: Rig) -> None:
    engine.ask(prompt(40), attempt=2, remote=True)
    engine.peer.open("a", 3, attempt=1)
    engine.until(lambda: engine.peer.socket.poll(0))
    assert "superseded" in engine.peer.read().reason


# ---------------------------------------------------------------- what must not be paired


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"decode_epoch": 6}, "sent to boot epoch 6, which is not this worker's"),
        ({"fingerprint": "other"}, "KV layout other differs from this worker's"),
        ({"blocks": 4}, "4 blocks do not match the length of the prompt"),
    ],
)
def test_a_wrong_prefill_worker_is_refused(engine: Rig, fields: dict[str, Any], reason: str) -> None:
    engine.ask(prompt(40), remote=True)
    engine.peer.open("a", **({"blocks": 3} | fields))
    engine.until(lambda: engine.peer.socket.poll(0))
    assert reason in engine.peer.read().reason
    assert not engine.failures() and engine.engine.check_integrity().owned == 0


def test_a_prefill_worker_without_the_required_transport_is_refused(engine: Rig) -> None:
    engine.engine._transfers.incoming._required = "teleport"
    engine.ask(prompt(40), remote=True)
    engine.peer.open("a", blocks=3)
    engine.until(lambda: engine.peer.socket.poll(0))
    assert "kv_transport is teleport, but this worker cannot read the memory of p" in engine.peer.read().reason


def test_an_impossible_first_token_is_not_believed(engine: Rig) -> None:
    tokens = prompt(40)
    transferring(engine, tokens)
    engine.peer.ship(0, 3)
    engine.peer.done(token=261)
    engine.until(lambda: engine.is_clean)
    assert "first token 261 is outside" in engine.failures()[0].message


def test_corrupt_kv_fails_the_request_and_is_not_cached(engine: Rig) -> None:
    tokens = prompt(40)
    transferring(engine, tokens)
    engine.peer.ship(0, 3, frames=[engine.peer.blocks[0], b"x" * len(engine.peer.blocks[1]), engine.peer.blocks[2]])
    engine.until(lambda: engine.is_clean)
    assert [(f.phase, f.retryable) for f in engine.failures()] == [("transfer", True)]
    assert isinstance(engine.peer.read(), KVFailed)
    assert engine.engine.scheduler.pool.counts.cached == 0
    engine.ask(tokens, "again")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("again") == engine.oracle(tokens)


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
    engine.later(incoming.EARLY_OPEN_S + 1)
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
    monkeypatch.setattr(incoming, "MAX_EARLY_OPENS", 4)
    for number in range(6):
        engine.peer.open(f"unknown{number}", 1)
    engine.until(lambda: len(engine.engine._transfers.incoming._early) == 4 and engine.peer.socket.poll(0))
    assert engine.peer.read().request_id == "unknown0"
