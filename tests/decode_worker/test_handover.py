"""Two decode engines: a running stream leaves one for the other while it is decoded. The test plays the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from common.wire.messages import KVTarget

from ..engine_rig import prompt
from ..waiting import wait_until
from .handover_pair import Pair, Rig, nudge
from .lazy_device import LazyDevice

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 4, "presence_penalty": 0.5, "repetition_penalty": 1.2}


# ---------------------------------------------------------------- streams that leave


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shm"])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 13, 14, 200])
def test_a_stream_goes_on_elsewhere_with_the_same_tokens(
    make_engine: Callable[..., Rig], length: int, params: dict[str, Any], shared: bool
) -> None:
    pair = Pair(make_engine, shared=shared)
    pair.start(length, **params)
    pair.hand_over()
    pair.wait(pair.moved)
    assert pair.old.is_clean and len(pair.old.tokens()) < 40
    pair.finish()
    assert pair.new.reason(attempt=1) == "length"
    assert not pair.old.failures() and not pair.new.failures()
    assert pair.new.receiver.num_bytes == pair.old.sender.num_bytes > 0


@pytest.mark.slow
def test_decoding_goes_on_while_blocks_travel(pair: Pair) -> None:
    pair.start(100)
    num_known = len(pair.old.tokens())
    pair.hand_over()
    pair.old.turn(12)  # the target has not looked yet
    assert len(pair.old.tokens()) >= num_known + 11
    pair.wait(pair.moved)
    first = pair.new.deltas(attempt=1)[0]
    assert first.index == num_known and len(first.token_ids) >= 11
    pair.finish()


def test_many_streams_leave_at_once(make_engine: Callable[..., Rig]) -> None:
    pair = Pair(make_engine, num_blocks=128, max_num_seqs=12)
    pair.new.engine.scheduler.max_num_seqs = 12
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        pair.start(10 + 17 * number, name, count=40, **(SAMPLED if number % 2 else {}))
    for name in names:
        pair.hand_over(name)
    pair.wait(lambda: all(map(pair.moved, names)))
    for name in names:
        pair.finish(name)


@pytest.mark.slow
def test_the_new_worker_reports_at_once_and_repeats_logprobs(make_engine: Callable[..., Rig]) -> None:
    pair, undisturbed = Pair(make_engine), make_engine()
    pair.start(30, count=24, logprobs=2)
    pair.hand_over()
    pair.wait(pair.moved)
    pair.finish()
    undisturbed.ask(pair.prompts["a"], **pair.params["a"])
    undisturbed.until(lambda: undisturbed.is_clean)
    expected = [one for delta in undisturbed.deltas() for one in delta.logprobs]
    for delta in pair.deltas():
        for offset, one in enumerate(delta.logprobs):
            assert one.logprob == pytest.approx(expected[delta.index + offset].logprob, abs=1e-4)
        assert len(delta.logprobs) == len(delta.token_ids)


@pytest.mark.slow
def test_a_stream_that_came_by_hand_over_leaves_again(make_engine: Callable[..., Rig]) -> None:
    pair, third = Pair(make_engine), make_engine(worker_id="third")
    pair.start(50, logprobs=0, **SAMPLED)
    pair.hand_over()
    pair.wait(pair.moved)
    pair.until(lambda: len(pair.new.tokens(attempt=1)) > 5)
    known = pair.merged()
    third.tell(structs.replace(pair.request("a", known, 2, 32), prefill_worker="new"))
    target = KVTarget("third", 7, third.receiver.address)
    pair.new.tell(structs.replace(pair.order("a", len(known), 2, 1, 32), target=target))
    wait_until(lambda: pair.new.reason(attempt=1) == "moved", meanwhile=lambda: nudge(pair.new, third))
    wait_until(lambda: third.is_clean and third.reason(attempt=2), meanwhile=third.turn)
    assert pair.new.is_clean
    assert pair.merged()[: len(known)] + third.tokens(attempt=2) == pair.expected()


@pytest.mark.slow
def test_blocks_that_the_new_worker_has_are_not_sent(pair: Pair) -> None:
    pair.start(64)
    pair.new.ask(pair.prompts["a"], "b", max_tokens=1)
    pair.until(lambda: pair.new.reason("b"))
    pair.hand_over()
    pair.wait(pair.moved)
    pair.finish()
    assert pair.new.receiver.num_bytes < 3 * pair.new.kv.block_bytes


@pytest.mark.slow
def test_a_step_in_flight_completes_before_its_sequence_leaves(make_engine: Callable[..., Rig]) -> None:
    devices: list[LazyDevice] = []

    def launcher(runner: Any, sampler: Any) -> LazyDevice:
        devices.append(LazyDevice(runner, sampler))
        return devices[-1]

    pair = Pair(make_engine, launcher=launcher)
    pair.start(30, **{"temperature": 1.0, "seed": 2})
    pair.start(20, "stays")
    pair.hand_over()
    pair.wait(pair.moved)
    assert devices[0].num_fed > 0
    pair.finish()
    pair.finish("stays")


# ---------------------------------------------------------------- the room on the other side


@pytest.mark.slow
def test_a_stream_that_outruns_its_room_before_the_grant_stays(pair: Pair) -> None:
    pair.start(30)
    pair.hand_over(reserved=4)
    pair.old.turn(30)  # the target has not looked yet
    pair.goes_on(why="the target granted no blocks before")


@pytest.mark.slow
def test_a_stream_pauses_where_its_room_ends(pair: Pair) -> None:
    notify = pair.old.engine.notify
    pair.old.sender._on_advanced = lambda event: notify(replace(event, caught_up=False))
    pair.start(30)
    pair.hand_over(reserved=4)
    pair.old.turn(1)
    handovers = pair.old.engine._handovers._by_key
    pair.wait(lambda: handovers["a", 1].granted)  # before it has outrun that room
    pair.until(lambda: pair.old.engine.scheduler.num_leaving)
    pair.wait(pair.moved)
    (first, *_) = pair.new.deltas(attempt=1)
    assert 30 + first.index + len(first.token_ids) == 48 + 1  # three blocks, and the token whose KV is not there yet
    pair.finish()


@pytest.mark.slow
def test_unused_room_is_given_back(pair: Pair) -> None:
    pair.start(20)
    pair.hand_over(reserved=128)
    pair.wait(pair.moved)
    sequence = pair.new.engine.scheduler.find("a")
    assert len(sequence.blocks) <= -(-sequence.num_tokens // 16)
    pair.finish()


@pytest.mark.slow
def test_without_room_on_the_target_the_stream_stays(make_engine: Callable[..., Rig]) -> None:
    pair = Pair(make_engine)
    pair.new.ask(prompt(400, 9), "big", max_tokens=100)
    pair.until(lambda: pair.new.tokens("big"))
    pair.start(90, count=40)
    pair.hand_over(reserved=64)
    pair.wait(lambda: pair.new.engine.scheduler.find("a"))
    pair.old.turn(3)
    pair.old.later(31.0)
    pair.goes_on(why="took longer than 30 s")
    assert not pair.new.failures("big") and pair.new.reason("big") == "length"
