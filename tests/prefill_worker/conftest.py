"""A KV sender with a decode worker's socket at its other end, driven by the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from diptych.common.messages import AnyMessage, KVDone, KVFailed, KVGrant, KVOpen, KVTarget, Message, decode, encode
from diptych.prefill_worker.kv_sender import KVSender, TransferEnded

WAIT_S = 20.0


class SenderRig:
    """`memory` holds the blocks. `read` returns what the decode worker's ROUTER socket got; `reply` answers."""

    def __init__(self, *, num_blocks: int = 16, block_bytes: int = 64, lease_s: float = 30.0, num_streams: int = 1) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.set(zmq.LINGER, 0)
        self.router.set(zmq.RCVHWM, 1)
        self.router.set(zmq.RCVBUF, 65536)
        self.router.bind("tcp://127.0.0.1:*")
        self.target = KVTarget("d", 7, self.router.get_string(zmq.LAST_ENDPOINT))
        self.memory = np.random.default_rng(0).integers(0, 255, (num_blocks, block_bytes), np.uint8)
        self.ended: list[TransferEnded] = []
        self.on_view: Callable[[int], None] = lambda index: None
        self.sender = KVSender(
            self.context,
            self.view,
            block_bytes,
            ("p", 5, "layout"),
            self.ended.append,
            lease_s=lease_s,
            num_streams=num_streams,
        )
        self.sender.start()
        self.peer = b""

    def view(self, index: int) -> memoryview:
        self.on_view(index)
        return memoryview(self.memory[index])

    def open(self, name: str = "a", blocks: int = 4, *, num_ready: int = 0, attempt: int = 0) -> None:
        self.sender.open(name, attempt, self.target, list(range(blocks)), num_ready)

    def finish(self, name: str = "a", blocks: int = 4, *, attempt: int = 0) -> None:
        self.sender.progress(name, attempt, blocks, KVDone(request_id=name, attempt=attempt, first_token=3))

    def grant(self, name: str = "a", first_block: int = 0, *, attempt: int = 0) -> None:
        self.reply(KVGrant(request_id=name, attempt=attempt, first_block=first_block))

    def reply(self, message: Message) -> None:
        self.router.send_multipart([self.peer, encode(message)])

    def read(self) -> tuple[AnyMessage, list[bytes]]:
        """The next message to the decode worker and the frames behind it."""
        assert self.router.poll(int(WAIT_S * 1000)), "nothing came"
        self.peer, header, *frames = self.router.recv_multipart()
        return decode(header), frames

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

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "the condition did not come true"
            time.sleep(0.002)

    def close(self) -> None:
        self.sender.stop()
        self.router.close()
        self.context.term()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., SenderRig]]:
    rigs: list[SenderRig] = []

    def make(**options: float) -> SenderRig:
        rigs.append(SenderRig(**options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., SenderRig]) -> SenderRig:
    return make_rig()
