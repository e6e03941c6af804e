"""Pulls over a wire that loses, spoils, repeats and delays messages: the answers stay right, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from common.latency.step_model import StepModel
from common.wire.codec import decode, encode
from common.wire.messages import KVBlocks, KVFailed, KVOpen

from ..engine_rig import prompt
from ..waiting import wait_until
from .test_pulls import ask, outcomes, pair, peer_of  # noqa: F401 - a fixture

Parts = list[bytes]
LONG = prompt(300, 21)
"""Of 18 full blocks."""
WAIT_S = 2.0
"""For blocks that may not come: long beside what the others take on a machine with much else to do."""


class Wire:
    """Between pullers and a lender. `fault` makes messages of each one that the lender sends; none: it is lost."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], lender: str) -> None:
        self.fault: Callable[[Parts], list[Parts]] = lambda parts: [parts]
        self._context, self._lender = context, lender
        self._front = context.socket(zmq.ROUTER)
        self._front.set(zmq.LINGER, 0)
        self._front.bind("tcp://127.0.0.1:*")
        self.address = self._front.get_string(zmq.LAST_ENDPOINT)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _main(self) -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        while not self._ended.is_set():
            if self._front.poll(5):
                puller, *parts = self._front.recv_multipart()
                if puller not in backs:
                    backs[puller] = self._context.socket(zmq.DEALER)
                    backs[puller].set(zmq.LINGER, 0)
                    backs[puller].connect(self._lender)
                backs[puller].send_multipart(parts)
            for puller, back in backs.items():
                while back.poll(0):
                    for parts in self.fault(back.recv_multipart()):
                        self._front.send_multipart([puller, *parts])
        for socket in (self._front, *backs.values()):
            socket.close()


@pytest.fixture
def wired(pair: Callable[..., Any]) -> Iterator[tuple[Any, Any, Wire]]:  # noqa: F811
    """A holder that has computed LONG, another worker, and the wire between them. A message has two blocks."""
    holder, other = pair(share=False)
    assert ask(holder, LONG, "long")[1] == 0
    holder.lender._batch = other.puller._batch = 2
    wire = Wire(holder.context, holder.lender.address)
    yield holder, other, wire
    wire.close()


def is_blocks(parts: Parts) -> bool:
    return isinstance(decode(parts[0]), KVBlocks)


def on_the_third(change: Callable[[Parts], list[Parts]]) -> Callable[[Parts], list[Parts]]:
    """Of the messages with blocks."""
    seen = 0

    def fault(parts: Parts) -> list[Parts]:
        nonlocal seen
        seen += is_blocks(parts)
        return change(parts) if seen == 3 and is_blocks(parts) else [parts]

    return fault


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def other_header(parts: Parts, **fields: Any) -> Parts:
    header = decode(parts[0])
    assert isinstance(header, KVBlocks)
    return [encode(replace(header, **fields)), *parts[1:]]


FAULTS: dict[str, Callable[[Parts], list[Parts]]] = {
    "lost": lambda parts: [],
    "a bit of a block": lambda parts: [[parts[0], flipped(parts[1], 99), *parts[2:]]],
    "a bit of the header": lambda parts: [[flipped(parts[0], 5), *parts[1:]]],
    "a block less": lambda parts: [parts[:-1]],
    "a block more": lambda parts: [[*parts, parts[-1]]],
    "no header": lambda parts: [parts[1:]],
    "half a block": lambda parts: [[parts[0], parts[1][:100], *parts[2:]]],
    "an overlong block": lambda parts: [[parts[0], parts[1] * 2, *parts[2:]]],
    "another token": lambda parts: [other_header(parts, token=7)],
    "other places": lambda parts: [other_header(parts, first_block=12)],
    "blocks of nowhere": lambda parts: [[other_header(parts, sources=(1, 2))[0]]],
    "twice": lambda parts: [parts, parts],
    "in the wrong order": lambda parts: [[parts[0], *reversed(parts[1:])]],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_makes_a_wrong_answer(
    wired: tuple[Any, Any, Wire], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", WAIT_S)
    monkeypatch.setattr("common.engine.sequences.restores.LEAST_WAIT_S", WAIT_S)
    holder, other, wire = wired
    wire.fault = on_the_third(FAULTS[fault])
    tokens, num_cached = ask(other, LONG, "a", peer=peer_of(holder, 18, address=wire.address))
    assert tokens == other.oracle(LONG)
    assert 64 <= num_cached < 288 or (fault == "twice" and num_cached == 288)
    wait_until(lambda: not other.puller._pulls)
    other.until(lambda: other.is_clean)
    again = [*LONG, *prompt(20, 22)]  # the puller and the connection are of use as before
    wire.fault = lambda parts: [parts]
    assert ask(other, again, "b")[0] == other.oracle(again)


def test_frames_that_come_after_the_deadline_harm_nobody(
    wired: tuple[Any, Any, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then their blocks may belong to others."""
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 0.2)
    holder, other, wire = wired
    held: list[Parts] = []

    def late(parts: Parts) -> list[Parts]:
        if is_blocks(parts):
            held.append(parts)
            return []
        return [parts]

    wire.fault = late
    assert ask(other, LONG, "a", peer=peer_of(holder, 18, address=wire.address)) == (other.oracle(LONG), 0)
    wait_until(lambda: not other.puller._pulls)
    other.until(lambda: other.is_clean)
    before = [bytes(other.kv.block(block)) for block in range(32)]
    wire.fault = lambda parts: [*held, parts]  # with the next message that comes
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 60.0)
    other.puller._avoided.clear()
    other.engine.step_fit.model = StepModel(token_s=1.0, num_steps=100)  # any pull is worth it
    assert ask(other, prompt(70, 23), "b", peer=peer_of(holder, 4, address=wire.address))[1] == 0
    own = other.engine.scheduler.pool.match(other.hashes(LONG))
    assert [bytes(other.kv.block(block)) for block in own] == [before[block] for block in own]
    assert outcomes(other) == {"late": 1.0, "missing": 1.0}


def test_a_lender_that_says_anything_is_answered_with_computing(wired: tuple[Any, Any, Wire]) -> None:
    holder, other, wire = wired

    def nonsense(parts: Parts) -> list[Parts]:
        message = decode(parts[0])
        if isinstance(message, KVOpen):
            return [[b"garbage"], [encode(replace(message, fingerprint="another"))]]
        return [[encode(KVFailed(request_id="nobody", attempt=3, reason="x"))], parts]

    wire.fault = nonsense
    assert ask(other, LONG, "a", peer=peer_of(holder, 18, address=wire.address)) == (other.oracle(LONG), 0)
    assert outcomes(other) == {"missing": 1.0}
    other.until(lambda: other.is_clean)
