"""KV blocks from one process to another through the workers' own sender and receiver."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import zmq

from common.engine.transfer.receiver import (
    IncomingTransfer,
    KVReceiver,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.engine.transfer.sender import KVSender, TransferEnded
from common.engine.transfer.transports.interface import OutgoingEnd
from common.engine.transfer.transports.tcp import Frames
from common.wire.messages import KVDone, KVGrant, KVTarget

TIMEOUT_S = 60.0

Events = SimpleQueue[TransferOpened | TransferCompleted | TransferFailed]


@dataclass(frozen=True)
class Shape:
    """The blocks to move."""

    block_bytes: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


def grant_all(pipe: Connection, receiver: KVReceiver, events: Events) -> None:
    """Start the receiver, send its address to the parent, and grant every transfer from the first block on."""
    receiver.start()
    pipe.send(receiver.address)
    while True:
        match events.get():
            case TransferOpened(peer, opened, now, memory):
                name, attempt, blocks = opened.request_id, opened.attempt, range(opened.num_blocks)
                if opened.offer is not None and memory is None:
                    raise RuntimeError("the sender's memory cannot be read here")
                receiver.expect(IncomingTransfer(name, attempt, peer, blocks, 0, now, now, memory=memory))
                grant = KVGrant(request_id=name, attempt=attempt, first_block=0, shared=memory is not None)
                receiver.send(peer, grant)
            case TransferFailed(reason=reason):
                raise RuntimeError(reason)


class BlockPath:
    """A KVSender that ships blocks as `frames` to a receiving process, or through `outgoing`.

    `run` moves all blocks once.
    """

    def __init__(self, address: str, shape: Shape, frames: Frames, outgoing: OutgoingEnd | None = None) -> None:
        self._shape, self._count = shape, 0
        self._target = KVTarget("receiver", 1, address)
        self._ended: SimpleQueue[TransferEnded] = SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sender = KVSender(
            self._context,
            frames,
            outgoing,
            shape.block_bytes,
            ("sender", 1, "fingerprint"),
            self._ended.put,
            lease_s=TIMEOUT_S,
            num_streams=1,
        )
        self._sender.start()

    def run(self) -> float:
        """Seconds from the announcement of the blocks to the acknowledgement of all. Raises RuntimeError."""
        self._count += 1
        name, count = f"transfer-{self._count}", self._shape.num_blocks
        begin = time.perf_counter()
        self._sender.open(name, 0, self._target, list(range(count)), count)
        self._sender.progress(name, 0, count, KVDone(request_id=name, attempt=0, first_token=0))
        ended = self._ended.get(timeout=TIMEOUT_S)
        seconds = time.perf_counter() - begin
        if ended.reason:
            raise RuntimeError(ended.reason)
        return seconds

    def close(self) -> None:
        self._sender.stop()
        self._context.term()


class Receivers:
    """The receiving processes: started on demand, ended with the `with` block."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []

    def start(self, body: Callable[..., None], *arguments: object) -> Any:
        """Start a process; returns the first object that it sends, the address where it listens."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=body, args=(theirs, *arguments), daemon=True)
        process.start()
        self._processes.append(process)
        theirs.close()
        with ours:
            if not ours.poll(TIMEOUT_S):
                raise RuntimeError("the receiving process sent no address")
            return ours.recv()

    @property
    def last_pid(self) -> int:
        """Process id of the process that was started last."""
        return self._processes[-1].pid or 0

    def __enter__(self) -> Receivers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join(10.0)
            process.kill()
            process.join(10.0)
