"""What a decode worker says of requests that make progress, while their next token does not come yet."""

from __future__ import annotations

from typing import Any

import pytest

from common.wire.messages import KVWait

from ..engine_rig import prompt

Rig = Any  # EngineRig of conftest, which test modules cannot import


def test_prompts_that_are_computed_here_or_wait_for_it(make_engine: Any) -> None:
    engine = make_engine(chunk=16, max_num_seqs=1)
    engine.ask(prompt(200), "long")
    engine.ask(prompt(40, 1), "behind")
    engine.turn()
    assert engine.progress("long", "behind") == ["long", "behind"]
    engine.until(lambda: engine.deltas("long"))
    assert engine.progress("long", "behind") == ["behind"]  # the other one makes tokens
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("long") == engine.oracle(prompt(200))


def test_kv_that_arrives_is_progress_and_kv_that_does_not_come_is_none(engine: Any) -> None:
    tokens = prompt(40)
    engine.ask(tokens, remote=True)
    engine.turn()
    assert engine.progress("a") == []
    engine.granted(tokens)
    assert engine.progress("a") == ["a"]  # it fails by itself when no frame comes for long


def test_blocks_are_kept_for_the_next_prefill_worker_for_a_while_only(engine: Any) -> None:
    tokens = prompt(70)
    engine.ask(tokens, remote=True)
    engine.peer.ship(engine.granted(tokens), 3)
    engine.received_blocks("a", 0, 3)
    engine.ask(tokens, attempt=1, remote=True)  # the prefill worker died, the next one says when it makes progress
    assert engine.progress("a") == []
    engine.later(29)
    assert engine.engine.check_integrity().owned == 5
    engine.later(31)
    counts = engine.engine.check_integrity()
    assert (counts.owned, counts.cached) == (0, 3) and not engine.failures()
    other = engine.another_peer()
    engine.ship(tokens, engine.granted(tokens, attempt=1, peer=other), attempt=1, peer=other)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(tokens)


@pytest.mark.slow
def test_a_preempted_stream_that_is_computed_again(make_engine: Any) -> None:
    engine = make_engine(num_blocks=8, chunk=16)
    for name in ("old", "young"):
        engine.ask(prompt(40, len(name)), name, max_tokens=60)
    engine.until(lambda: any(s.num_preemptions for s in engine.engine.scheduler))
    assert engine.progress("old", "young") == ["young"]
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("young") == engine.oracle(prompt(40, 5), 60)


def test_a_held_stream_keeps_making_progress(make_engine: Any) -> None:
    engine = make_engine()
    engine.ask(prompt(20))
    engine.until(lambda: engine.deltas())
    engine.engine.hold(True)
    engine.turn()
    assert engine.progress("a") == ["a"]
    engine.engine.hold(False)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(prompt(20))


def test_a_held_worker_fails_no_request_that_waits_for_blocks(engine: Any) -> None:
    """It grants none while it is held, whether they are free or not. Its prefill worker keeps the blocks it has."""
    engine.engine.hold(True)
    tokens = prompt(40)
    engine.ask(tokens, remote=True)
    engine.compute(tokens)
    engine.peer.open("a", 3)
    engine.until(lambda: engine.engine.scheduler.queue)
    for passed in (20, 40, 60):
        engine.later(passed)
        assert isinstance(engine.peer.read(), KVWait)
    assert not engine.failures() and engine.progress("a") == ["a"]
    engine.engine.hold(False)
    engine.later(80)  # its own wait begins now
    assert isinstance(engine.peer.read(), KVWait) and not engine.failures()
    engine.until(lambda: engine.peer.socket.poll(0))
    engine.ship(tokens, engine.peer.read().first_block)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(tokens)


def test_a_held_worker_keeps_the_blocks_for_the_next_prefill_worker(engine: Any) -> None:
    tokens = prompt(70)
    engine.ask(tokens, remote=True)
    engine.peer.ship(engine.granted(tokens), 3)
    engine.received_blocks("a", 0, 3)
    engine.ask(tokens, attempt=1, remote=True)  # the prefill worker died, the next one is held too
    engine.turn()
    engine.engine.hold(True)
    for passed in (20, 40, 60):
        engine.later(passed)
    assert engine.engine.check_integrity().owned == 5
