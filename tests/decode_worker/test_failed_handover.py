"""A running stream is to leave one decode engine for another, and something goes wrong. The test plays the router."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from common.blocks.block_hash import block_hashes
from common.engine.transfer.sender import TransferEnded
from common.engine.worker.contract import RouterLost
from common.wire.messages import AbortRequest
from decode_worker import handover
from decode_worker.sequence import RequestStatus

from ..engine_rig import ROUTER, prompt
from ..waiting import wait_until
from .handover_pair import Pair, Rig

# ---------------------------------------------------------------- what goes wrong


@pytest.mark.slow
def test_a_target_of_another_life_refuses(pair: Pair) -> None:
    pair.start()
    pair.new.engine._transfers.incoming._epoch = 8
    pair.hand_over()
    pair.goes_on(why="boot epoch")


@pytest.mark.slow
def test_a_target_that_is_told_to_forget_it(pair: Pair) -> None:
    pair.start(100)
    pair.hand_over()
    pair.wait(lambda: pair.new.engine.scheduler.num_transferring)
    pair.new.tell(AbortRequest(request_id="a", attempt=1))
    pair.goes_on(why="aborted")


def test_a_block_that_arrives_spoilt(make_engine: Callable[..., Rig]) -> None:
    pair = Pair(make_engine)
    frames = pair.old.sender._frames
    view = frames.view
    pair.start(100)
    frames.view = lambda index: memoryview(bytes(view(index)))
    pair.new.receiver._blocks.view = lambda index: memoryview(bytearray(7))
    pair.hand_over()
    pair.goes_on(why="bytes")
    pair.wait(pair.new.failures)
    assert pair.new.failures()[0].phase == "transfer"


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["everything", "the acknowledgement"])
def test_a_target_that_does_not_answer(pair: Pair, lost: str) -> None:
    """The stream goes on from where it paused, whether the target has it too or not."""
    pair.filter_events(lambda event: not isinstance(event, TransferEnded))
    pair.start()
    pair.hand_over()
    pair.wait(lambda: pair.old.engine.scheduler.num_leaving)
    if lost == "everything":
        pair.new.tell(AbortRequest(request_id="a", attempt=1))
    num_tokens = len(pair.old.tokens())
    assert pair.old.engine.snapshot().num_transferring == 1
    pair.old.later(handover.MAX_PAUSE_S + 1)
    pair.old.turn(2)
    assert len(pair.old.tokens()) > num_tokens
    pair.goes_on(why="did not answer")


def test_a_hand_over_that_takes_too_long(pair: Pair) -> None:
    pair.start()
    pair.old.tell(pair.order("a", len(pair.old.tokens()), 1, 0, 32))  # no request at the target
    pair.old.turn(2)
    pair.old.later(31.0)
    pair.wait(lambda: pair.old.failures() and not pair.new.engine._transfers.incoming._early)
    pair.goes_on(why="took longer than 30 s")


def test_an_answer_that_ends_meanwhile(pair: Pair) -> None:
    pair.start(40, count=8)
    pair.hand_over()
    pair.old.turn(10)  # the target has not looked yet
    assert pair.old.reason() == "length"
    pair.new.tell(AbortRequest(request_id="a", attempt=1))
    pair.finish()
    assert not pair.old.failures()


@pytest.mark.parametrize("phase", ["copying", "paused"])
def test_an_abort_reaches_a_stream_that_is_leaving(pair: Pair, phase: str) -> None:
    pair.filter_events(lambda event: not isinstance(event, TransferEnded))
    pair.start(100)
    pair.hand_over()
    if phase == "paused":
        pair.wait(lambda: pair.old.engine.scheduler.num_leaving)
    else:
        pair.old.turn(2)
    for rig in (pair.old, pair.new):
        rig.tell(AbortRequest(request_id="a", attempt=1))
    pair.until(lambda: pair.old.is_clean and pair.new.is_clean)
    assert not pair.old.reason() and not pair.old.failures()


def test_a_router_that_is_lost_meanwhile(pair: Pair) -> None:
    pair.filter_events(lambda event: not isinstance(event, TransferEnded))
    pair.start()
    pair.hand_over()
    pair.wait(lambda: pair.old.engine.scheduler.num_leaving)
    for rig in (pair.old, pair.new):
        rig.engine.submit(RouterLost(ROUTER))
    pair.until(lambda: pair.old.is_clean and pair.new.is_clean)


@pytest.mark.slow
def test_a_second_order_replaces_the_first(pair: Pair) -> None:
    pair.start(100)
    pair.old.tell(pair.order("a", len(pair.old.tokens()), 1, 0, 32))
    pair.old.turn(2)
    pair.hand_over(new_attempt=2)
    pair.wait(pair.moved)
    pair.finish()
    assert pair.new.reason(attempt=2) == "length"


@pytest.mark.slow
def test_the_same_worker_takes_it_back_as_a_new_attempt(pair: Pair) -> None:
    pair.filter_events(lambda event: not isinstance(event, TransferEnded))
    pair.start()
    pair.hand_over()
    pair.wait(lambda: pair.old.engine.scheduler.num_leaving)
    pair.new.tell(AbortRequest(request_id="a", attempt=1))
    pair.old.ask(pair.prompts["a"], attempt=2, **pair.params["a"])
    pair.until(lambda: pair.old.is_clean and pair.new.is_clean)
    assert pair.old.tokens(attempt=2) == pair.expected()


@pytest.mark.slow
def test_what_the_target_has_of_a_stream_outlives_the_old_worker(pair: Pair) -> None:
    pair.filter_events(lambda event: False)  # the old worker gets no further than its first copies
    pair.start(100)
    known = pair.old.tokens()
    pair.hand_over()
    transfers = pair.new.receiver._transfers
    pair.wait(lambda: ("a", 1) in transfers and len(transfers["a", 1].received) == 6)
    again = structs.replace(pair.request("a", known, 2, 0), prefill_worker="")
    pair.new.tell(again)
    pair.wait(lambda: pair.new.reason(attempt=2))
    assert known + pair.new.tokens(attempt=2) == pair.expected()
    assert pair.new.deltas(attempt=2)[0].num_cached_tokens == 6 * 16
    pair.old.tell(AbortRequest(request_id="a", attempt=0))
    pair.until(lambda: pair.old.is_clean and pair.new.is_clean)


# ---------------------------------------------------------------- orders that make no sense


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": "unknown"}, "this worker does not have attempt 0"),
        ({"attempt": 1}, "this worker does not have attempt 1"),
        ({"num_known": 99}, "output tokens are not from this attempt"),
    ],
)
def test_an_order_that_fits_no_stream_is_refused(pair: Pair, change: dict[str, Any], why: str) -> None:
    pair.start()
    values = {"name": "a", "num_known": 1, "new_attempt": 7, "attempt": 0, "reserved": 8} | change
    pair.old.tell(pair.order(**values))
    pair.wait(lambda: pair.old.failures(values["name"]))
    (failed,) = pair.old.failures(values["name"])
    assert (failed.attempt, failed.phase) == (7, "handover") and why in failed.message
    pair.finish()


@pytest.mark.slow
def test_another_routers_order_is_refused(pair: Pair) -> None:
    pair.start()
    pair.old.tell(pair.order("a", 1, 7, 0, 8), b"stranger")
    pair.goes_on(why="this worker does not have attempt 0")


@pytest.mark.slow
def test_a_stream_without_kv_is_given_up_for_another_worker_to_compute(make_engine: Callable[..., Rig]) -> None:
    pair = Pair(make_engine, num_blocks=8)
    pair.start(40, count=60, tokens=1)
    pair.start(41, "b", count=60, tokens=1)
    preempted = lambda: [s for s in pair.old.engine.scheduler.queue if s.num_preemptions]  # noqa: E731
    wait_until(preempted, meanwhile=pair.old.turn)
    name = preempted()[0].request_id
    pair.old.tell(pair.order(name, 1, 1, 0, 8))
    pair.until(lambda: pair.old.failures(name))
    assert (pair.old.failures(name)[0].attempt, pair.old.failures(name)[0].retryable) == (0, True)
    pair.finish("b" if name == "a" else "a")


def take_order(old: Rig) -> None:
    """A turn for what is in the inbox, and none besides: the stream may not be preempted before it is offered."""
    if not old.engine._inbox.empty():
        old.turn()
    time.sleep(0.001)


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_is_shipped_of_blocks_that_were_given_to_others(
    make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A stream is preempted while it is copied: others' KV is written to its blocks in that very step."""
    pair = Pair(make_engine, num_blocks=9, chunk=256)
    old, new = pair.old, pair.new
    for seed, (name, length) in enumerate({"a": 40, "b": 40, "s": 36}.items(), 1):
        pair.prompts[name], pair.params[name] = prompt(length, seed), {"max_tokens": 40}
        old.ask(pair.prompts[name], name, max_tokens=40)
        old.turn()
    wait_until(lambda: len(old.tokens("s")) >= 3, meanwhile=old.turn)
    known = old.tokens("s")
    pair.hand_over("s")
    wait_until(lambda: new.engine._inbox.qsize() == 2, meanwhile=lambda: take_order(old))
    forward = old.engine._runner.forward
    preempted: list[list[int]] = []

    def slow(chunks: Any) -> Any:
        result = forward(chunks)
        sequence = old.engine.scheduler.find("s")
        if sequence.status is RequestStatus.PREEMPTED and not preempted:
            end = time.monotonic() + 0.5
            while time.monotonic() < end:  # the target makes room, and takes what comes
                new.turn()
            transfer = new.receiver._transfers.get(("s", 1))
            preempted.append(sorted(transfer.received) if transfer else [])
            if fails:
                raise RuntimeError("scripted")
        return result

    monkeypatch.setattr(old.engine._runner, "forward", slow)
    wait_until(lambda: preempted, meanwhile=old.turn)
    assert preempted == [[]]
    assert "its blocks are needed here" in old.failures("s")[0].message
    wait_until(lambda: new.failures("s"), meanwhile=new.turn)
    text = pair.prompts["s"] + known
    assert not new.engine.scheduler.pool.match(block_hashes(text, 16))
    new.ask(text, "s", attempt=5, num_output=len(known), max_tokens=40)
    new.until(lambda: new.reason("s", attempt=5))
    assert known + new.tokens("s", attempt=5) == pair.expected("s")


@pytest.mark.slow
def test_a_stream_that_loses_its_blocks_meanwhile_stays(make_engine: Callable[..., Rig]) -> None:
    pair = Pair(make_engine, num_blocks=8)
    pair.start(40, count=60, tokens=1)
    pair.start(41, "b", count=60, tokens=1)
    pair.old.tell(pair.order("b", len(pair.old.tokens("b")), 1, 0, 128))  # no request at the target
    wait_until(lambda: pair.old.failures("b"), meanwhile=pair.old.turn)
    assert "its blocks are needed" in pair.old.failures("b")[0].message
    pair.until(lambda: not pair.new.engine._transfers.incoming._early)
    pair.finish("a")
    pair.finish("b")
