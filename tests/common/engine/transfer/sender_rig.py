"""A decode worker's KV socket that the test holds, and a KV sender at its other end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import zmq

from common.engine.kv.block_ring import BlockRing
from common.engine.kv.shared_memory import KVMemory
from common.engine.transfer.sender import KVSender, TransferEnded
from common.engine.transfer.transports.shm import SharedBlocks
from common.engine.transfer.transports.tcp import Frames
from common.wire.codec import decode, encode
from common.wire.messages import AnyMessage, KVAck, KVDone, KVFailed, KVGrant, KVOpen, KVTarget, Message

from ....engine_rig import WAIT_S, made
from ....waiting import wait_until


class DecodeSide:
    """A decode worker's ROUTER socket. `read` returns what came; `reply` answers whoever sent that."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.set(zmq.LINGER, 0)
        self.router.set(zmq.RCVHWM, 1)
        self.router.set(zmq.RCVBUF, 65536)
        self.router.bind("tcp://127.0.0.1:*")
        self.target = KVTarget("d", 7, self.router.get_string(zmq.LAST_ENDPOINT))
        self.peer = b""
        self._connection = -1

    def make_sender(
        self, view: Callable[[int], memoryview], block_bytes: int, on_ended: Callable[[TransferEnded], None],
        lease_s: float, num_streams: int, memory: KVMemory | None = None, require_shared: bool = False,
        quantise: Callable[[Sequence[int]], Sequence[memoryview]] | None = None, ring: BlockRing | None = None,
    ) -> KVSender:  # fmt: skip
        frames = Frames(view, quantise=quantise)
        outgoing = SharedBlocks(frames, memory, ring, is_required=require_shared) if memory or ring else None
        return KVSender(
            self.context,
            frames,
            outgoing,
            block_bytes,
            ("p", 5, "layout"),
            on_ended,
            lease_s=lease_s,
            num_streams=num_streams,
        )

    def grant(self, name: str = "a", first_block: int = 0, *, attempt: int = 0, **fields: bool) -> None:
        """`fields`: `shared`, `quantised`."""
        self.reply(KVGrant(request_id=name, attempt=attempt, first_block=first_block, **fields))

    def ack(self, name: str = "a", *, attempt: int = 0) -> None:
        self.reply(KVAck(request_id=name, attempt=attempt))

    def fail(self, name: str = "a", *, attempt: int = 0) -> None:
        self.reply(KVFailed(request_id=name, attempt=attempt, reason="no room"))

    def reply(self, message: Message) -> None:
        self.router.send_multipart([self.peer, encode(message)])

    def read(self) -> tuple[AnyMessage, list[bytes]]:
        """The next message to the decode worker and the frames behind it."""
        assert self.router.poll(int(WAIT_S * 1000)), "nothing came"
        parts = self.router.recv_multipart(copy=False)
        self._connection = parts[0].get(zmq.SRCFD)
        self.peer, header, *frames = (part.bytes for part in parts)
        return decode(header), frames

    def cut(self) -> None:
        """Break the TCP connection that the last message came through. The sender's socket connects again."""
        with socket.socket(fileno=os.dup(self._connection)) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def read_open(self) -> KVOpen:
        message, _ = self.read()
        assert isinstance(message, KVOpen)
        return message

    def read_failed(self) -> KVFailed:
        message, _ = self.read()
        while isinstance(message, KVOpen):
            message, _ = self.read()
        assert isinstance(message, KVFailed)
        return message

    wait = staticmethod(wait_until)


class SenderRig(DecodeSide):
    """A sender alone; `memory` holds the blocks."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_bytes: int = 64,
        lease_s: float = 30.0,
        num_streams: int = 1,
        memory: KVMemory | None = None,
        require_shared: bool = False,
        quantise: Callable[[int], memoryview] | None = None,
        ring: BlockRing | None = None,
    ) -> None:
        super().__init__()
        self.memory = np.random.default_rng(0).integers(0, 255, (num_blocks, block_bytes), np.uint8)
        self.ended: list[TransferEnded] = []
        self.on_view: Callable[[int], None] = lambda index: None
        self.sender = self.make_sender(
            self.view,
            block_bytes,
            self.ended.append,
            lease_s,
            num_streams,
            memory,
            require_shared,
            quantise,
            ring,
        )
        self.sender.start()

    def view(self, index: int) -> memoryview:
        self.on_view(index)
        return memoryview(self.memory[index])

    def open(self, name: str = "a", blocks: int = 4, *, num_ready: int = 0, attempt: int = 0) -> None:
        self.sender.open(name, attempt, self.target, list(range(blocks)), num_ready)

    def finish(self, name: str = "a", blocks: int = 4, *, attempt: int = 0) -> None:
        self.sender.progress(name, attempt, blocks, KVDone(request_id=name, attempt=attempt, first_token=3))

    def close(self) -> None:
        self.sender.stop()
        self.router.close()
        self.context.term()


@pytest.fixture
def make_sender_rig() -> Iterator[Callable[..., SenderRig]]:
    yield from made(SenderRig)
