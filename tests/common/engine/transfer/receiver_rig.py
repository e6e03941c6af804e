"""A KV receiver over plain memory, and the prefill worker's socket that a test speaks through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import zmq

from common.engine.kv.checksums import checksum
from common.engine.kv.shared_memory import SharedMemory
from common.engine.kv.staging import IncomingBlocks
from common.engine.transfer.receiver import (
    IncomingTransfer,
    KVListener,
    KVReceiver,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.engine.transfer.transports.interface import IncomingEnd
from common.engine.transfer.transports.shm import SharedReads
from common.wire.codec import decode, encode
from common.wire.messages import AnyMessage, KVBlocks, KVDone, KVGrant, KVOffer, KVOpen, Message
from common.wire.sampling_params import TokenLogprobs

from ....engine_rig import WAIT_S, PlainBlocks, made, wait


class Peer:
    """A prefill worker's socket. `blocks` are what the test ships by default: numbered, one pattern each."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, block_bytes: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address)
        self.blocks = [bytes([number + 1]) * block_bytes for number in range(64)]
        self.shared: SharedMemory | None = None
        self.offer: KVOffer | None = None
        self.tokens: dict[tuple[str, int], int] = {}  # of grants

    def send(self, message: Message | bytes, *frames: bytes) -> None:
        self.socket.send_multipart([encode(message) if isinstance(message, Message) else message, *frames])

    def ship(
        self, first: int, count: int, name: str = "a", *, attempt: int = 0, frames: Sequence[bytes] | None = None
    ) -> None:
        """Blocks `first .. first + count - 1`, honestly labelled; `frames` replaces what really travels."""
        sums = tuple(checksum(memoryview(block)) for block in self.blocks[first : first + count])
        token = self.tokens.get((name, attempt), 0)
        header = KVBlocks(request_id=name, attempt=attempt, first_block=first, checksums=sums, token=token)
        self.send(header, *(self.blocks[first : first + count] if frames is None else frames))

    def share(self, *, is_ring: bool = False) -> SharedMemory:
        """Offer `blocks`, in their order, to be copied; `is_ring`: as places of a ring."""
        data = b"".join(self.blocks)
        self.shared = SharedMemory(len(data), is_ring=is_ring)
        self.shared.pages[: len(data)] = data
        self.offer = KVOffer.of("shm", self.shared.offer)
        return self.shared

    def name(self, first: int, sources: Sequence[int], name: str = "a", *, sums: Sequence[bytes] = ()) -> None:
        """Blocks from `first` on are `blocks[source]` of the shared memory; `sums` replaces what is checksummed."""
        known = sums or [self.blocks[source % len(self.blocks)] for source in sources]
        checksums = tuple(checksum(memoryview(block)) for block in known)
        self.send(KVBlocks(request_id=name, attempt=0, first_block=first, checksums=checksums, sources=tuple(sources)))

    def done(self, name: str = "a", *, attempt: int = 0, token: int = 3, logprobs: TokenLogprobs | None = None) -> None:
        secret = self.tokens.get((name, attempt), 0)
        self.send(KVDone(request_id=name, attempt=attempt, first_token=token, logprobs=logprobs, token=secret))

    def open(self, name: str = "a", blocks: int = 4, *, attempt: int = 0, **fields: object) -> None:
        values = {"worker_id": "p", "epoch": 5, "decode_epoch": 7, "fingerprint": "layout"} | fields
        self.send(KVOpen(request_id=name, attempt=attempt, num_blocks=blocks, **values))  # type: ignore[arg-type]

    def read(self) -> AnyMessage:
        assert self.socket.poll(int(WAIT_S * 1000)), "nothing came"
        message = decode(self.socket.recv())
        if isinstance(message, KVGrant):
            self.tokens[message.request_id, message.attempt] = message.token
        return message


class ReceiverRig:
    """`memory` holds the blocks, `events` what the receiver reported."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_bytes: int = 64,
        transports: Callable[[np.ndarray], Sequence[IncomingEnd[Any]]] = lambda memory: (SharedReads(),),
        blocks: IncomingBlocks | None = None,
        quantised: IncomingBlocks | None = None,
    ) -> None:
        """`transports` is given `memory`. Blocks arrive in `blocks` instead of `memory` if these are given."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.block_bytes = block_bytes
        self.memory = np.zeros((num_blocks, block_bytes), np.uint8)
        self.events: list[TransferOpened | TransferCompleted | TransferFailed] = []
        self.on_event: Callable[[TransferOpened | TransferCompleted | TransferFailed], None] = self.events.append
        self.receiver = KVReceiver(
            self.context,
            KVListener(self.context, "127.0.0.1", 0),
            blocks or PlainBlocks(self.memory),
            lambda event: self.on_event(event),
            transports=transports(self.memory),
            quantised=quantised,
        )
        self.receiver.start()
        self.peers: list[Peer] = []

    def peer(self) -> Peer:
        self.peers.append(Peer(self.context, self.receiver.address, self.block_bytes))
        return self.peers[-1]

    def expect(
        self, peer: Peer, blocks: Sequence[int] = range(4), name: str = "a", *, first: int = 0, attempt: int = 0,
        offer: KVOffer | None = None,
    ) -> IncomingTransfer:  # fmt: skip
        """Lend `blocks` to a prefill worker that announces itself, makes its `offer` and gets its grant."""
        peer.open(name, len(blocks), attempt=attempt, offer=offer or peer.offer)
        wait(lambda: self.events)
        opened = self.events.pop()
        assert isinstance(opened, TransferOpened)
        transfer = IncomingTransfer(
            name, attempt, opened.peer, tuple(blocks), first, 0.0, time.monotonic(), memory=opened.memory
        )
        self.receiver.expect(transfer)
        shared = opened.memory is not None
        self.receiver.send(opened.peer, KVGrant(request_id=name, attempt=attempt, first_block=first, shared=shared))
        assert isinstance(peer.read(), KVGrant)
        return transfer

    def event(self) -> TransferOpened | TransferCompleted | TransferFailed:
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


def _name(event: TransferOpened | TransferCompleted | TransferFailed) -> str:
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
    yield from made(ReceiverRig)
