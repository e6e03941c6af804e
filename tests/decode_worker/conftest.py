"""A KV receiver, prefill workers' sockets for the test to speak through, and a real sender for the pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import zmq

from diptych.common.kv_wire import checksum
from diptych.common.messages import AnyMessage, KVBlocks, KVDone, KVGrant, KVOpen, Message, decode, encode
from diptych.decode_worker.kv_receiver import KVReceiver, TransferFailed, TransferLanded, TransferOpened
from diptych.decode_worker.landing import Landing

WAIT_S = 20.0


def wait(condition: Callable[[], object]) -> None:
    """Wait for a condition; fail the test when it never comes true."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


class Peer:
    """A prefill worker's socket. `blocks` are what the test ships by default: numbered, one pattern each."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, block_bytes: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address)
        self.blocks = [bytes([number + 1]) * block_bytes for number in range(64)]

    def send(self, message: Message | bytes, *frames: bytes) -> None:
        self.socket.send_multipart([encode(message) if isinstance(message, Message) else message, *frames])

    def ship(
        self, first: int, count: int, name: str = "a", *, attempt: int = 0, frames: Sequence[bytes] | None = None
    ) -> None:
        """Blocks `first .. first + count - 1`, honestly labelled; `frames` replaces what really travels."""
        sums = tuple(checksum(memoryview(block)) for block in self.blocks[first : first + count])
        header = KVBlocks(request_id=name, attempt=attempt, first_block=first, checksums=sums)
        self.send(header, *(self.blocks[first : first + count] if frames is None else frames))

    def done(self, name: str = "a", *, attempt: int = 0) -> None:
        self.send(KVDone(request_id=name, attempt=attempt, first_token=3))

    def open(self, name: str = "a", blocks: int = 4, *, attempt: int = 0, **fields: object) -> None:
        values = {"worker_id": "p", "epoch": 5, "decode_epoch": 7, "fingerprint": "layout"} | fields
        self.send(KVOpen(request_id=name, attempt=attempt, num_blocks=blocks, **values))  # type: ignore[arg-type]

    def read(self) -> AnyMessage:
        assert self.socket.poll(int(WAIT_S * 1000)), "nothing came"
        return decode(self.socket.recv())


class ReceiverRig:
    """`memory` holds the blocks, `events` what the receiver reported."""

    def __init__(self, *, num_blocks: int = 32, block_bytes: int = 64) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.block_bytes = block_bytes
        self.memory = np.zeros((num_blocks, block_bytes), np.uint8)
        self.events: list[TransferOpened | TransferLanded | TransferFailed] = []
        self.on_event: Callable[[TransferOpened | TransferLanded | TransferFailed], None] = self.events.append
        self.receiver = KVReceiver(
            self.context, "127.0.0.1", 0, lambda index: memoryview(self.memory[index]), lambda e: self.on_event(e)
        )
        self.receiver.start()
        self.peers: list[Peer] = []

    def peer(self) -> Peer:
        self.peers.append(Peer(self.context, self.receiver.address, self.block_bytes))
        return self.peers[-1]

    def expect(
        self, peer: Peer, blocks: Sequence[int] = range(4), name: str = "a", *, first: int = 0, attempt: int = 0
    ) -> Landing:
        """Lend `blocks` to a prefill worker that announces itself and gets its grant."""
        peer.open(name, len(blocks), attempt=attempt)
        wait(lambda: self.events)
        opened = self.events.pop()
        assert isinstance(opened, TransferOpened)
        landing = Landing(name, attempt, opened.peer, tuple(blocks), first, 0.0, time.monotonic())
        self.receiver.expect(landing)
        self.receiver.send(opened.peer, KVGrant(request_id=name, attempt=attempt, first_block=first))
        assert isinstance(peer.read(), KVGrant)
        return landing

    def event(self) -> TransferOpened | TransferLanded | TransferFailed:
        wait(lambda: self.events)
        return self.events.pop(0)

    def sync(self) -> None:
        """Wait until everything that peers have sent so far was handled."""
        for number, peer in enumerate(self.peers):
            peer.open(f"sync{number}")
            wait(lambda name=f"sync{number}": any(_name(event) == name for event in self.events))  # type: ignore[misc]
        self.events = [event for event in self.events if not _name(event).startswith("sync")]
        self.on_event = self.events.append

    def close(self) -> None:
        self.receiver.stop()
        for peer in self.peers:
            peer.socket.close()
        self.context.term()


def _name(event: TransferOpened | TransferLanded | TransferFailed) -> str:
    return event.message.request_id if isinstance(event, TransferOpened) else ""


@pytest.fixture
def rig() -> Iterator[ReceiverRig]:
    rig = ReceiverRig()
    yield rig
    rig.close()


@pytest.fixture
def peer(rig: ReceiverRig) -> Peer:
    return rig.peer()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., ReceiverRig]]:
    rigs: list[ReceiverRig] = []

    def make(**options: int) -> ReceiverRig:
        rigs.append(ReceiverRig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
