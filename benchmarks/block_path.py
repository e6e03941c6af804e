"""KV blocks from one process to another through the workers' own sender and receiver, as benchmarks move them."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from benchmarks import raw_tcp
from common.machine.allocator import keep_large_buffers
from common.transfer import frames as kv_frames
from common.transfer.incoming import IncomingTransfer, TransferCompleted, TransferFailed, TransferOpened
from common.transfer.nixl_agent import NixlAgent
from common.transfer.outgoing import TransferEnded
from common.transfer.receiver import KVReceiver
from common.transfer.remote_memory import OfferedMemory
from common.transfer.remote_reads import RemoteReads
from common.transfer.sender import KVSender
from common.transfer.shipping import Shipping
from common.wire.curve import Curve
from common.wire.curve_keys import KeyPair
from common.wire.gatekeeper import Gatekeeper
from common.wire.messages import KVDone, KVGrant, KVMemory, KVTarget

if TYPE_CHECKING:
    from common.kv.block_ring import BlockRing
    from common.kv.device_copies import OfferedDevice

TIMEOUT_S = 60.0
RECEIVE_CORE = 1
CHECKSUM = kv_frames.checksum

Events = SimpleQueue[TransferOpened | TransferCompleted | TransferFailed]


def _no_checksum(block: memoryview) -> int:
    return 0


@dataclass(frozen=True)
class Shape:
    """The blocks to move, ZeroMQ's threads, and whether each process is pinned to a core."""

    block_bytes: int
    num_blocks: int
    io_threads: int = 1
    pinned: bool = False

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def pin(self, core: int) -> None:
        """Call before the process starts threads, which inherit the core."""
        if self.pinned:
            os.sched_setaffinity(0, {core})


def serve_raw(pipe: Connection, shape: Shape) -> None:
    """Body of the process that receives raw TCP."""
    shape.pin(RECEIVE_CORE)
    raw_tcp.serve(pipe, shape.num_bytes)


def serve_blocks(
    pipe: Connection,
    shape: Shape,
    checksum: bool,
    pair: KeyPair | None = None,
    *,
    quantised: bool = False,
    nixl: bool = False,
) -> None:
    """Body of the process that receives KV: grants every announcement into the same blocks."""
    shape.pin(RECEIVE_CORE)
    keep_large_buffers()  # as a worker does
    if not checksum:
        kv_frames.checksum = _no_checksum
    cache = np.ones((shape.num_blocks, shape.block_bytes), np.uint8)
    events: Events = SimpleQueue()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shape.io_threads)
    curve = Curve(pair) if pair else None
    if curve is not None:
        Gatekeeper(context, curve).start()
    receiver = KVReceiver(context, "127.0.0.1", 0, lambda index: cache[index].data, events.put, curve=curve)
    if nixl:
        receiver.read_with(RemoteReads(NixlAgent("receiver"), shape.block_bytes))
    if quantised:
        # Imported here: the others need no torch, which takes a processor some seconds.
        from benchmarks.quantised_blocks import bfloat16_cache
        from common.kv.quantised_staging import quantised_incoming

        receiver.take_quantised(quantised_incoming(bfloat16_cache(shape.block_bytes, shape.num_blocks)))
    grant_all(pipe, receiver, events, quantised=quantised)


serve_quantised_blocks = functools.partial(serve_blocks, quantised=True)
serve_nixl_blocks = functools.partial(serve_blocks, nixl=True)


def grant_all(pipe: Connection, receiver: KVReceiver, events: Events, *, quantised: bool = False) -> None:
    """Start the receiver, send its address to the parent, and grant every transfer from the first block on."""
    receiver.start()
    pipe.send(receiver.address)
    while True:
        match events.get():
            case TransferOpened(peer, opened, now, memory):
                name, attempt, blocks = opened.request_id, opened.attempt, range(opened.num_blocks)
                if (opened.memory or opened.ring or opened.remote or opened.device) is not None and memory is None:
                    raise RuntimeError("the sender's memory cannot be read here")
                receiver.expect(
                    IncomingTransfer(name, attempt, peer, blocks, 0, now, now, memory=memory, quantised=quantised)
                )
                shared = memory is not None
                grant = KVGrant(request_id=name, attempt=attempt, first_block=0, shared=shared, quantised=quantised)
                receiver.send(peer, grant)
            case TransferFailed(reason=reason):
                raise RuntimeError(reason)


class BlockPath:
    """A KVSender that ships the blocks of `view` to a receiving process, which reads `memory`, the `ring`, `remote` or
    `device` instead.

    `run` moves all blocks once.
    """

    def __init__(
        self,
        address: str,
        shape: Shape,
        view: Callable[[int], memoryview],
        *,
        num_streams: int = 1,
        checksum: bool = True,
        memory: KVMemory | None = None,
        pair: KeyPair | None = None,
        quantise: Callable[[Sequence[int]], Sequence[memoryview]] | None = None,
        ring: BlockRing | None = None,
        remote: OfferedMemory | None = None,
        device: OfferedDevice | None = None,
    ) -> None:
        self._shape, self._checksum, self._count = shape, checksum, 0
        self._target = KVTarget("receiver", 1, address)
        self._ended: SimpleQueue[TransferEnded] = SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shape.io_threads)
        self._sender = KVSender(
            self._context,
            Shipping(view, quantise, memory, ring, remote=remote, device=device),
            shape.block_bytes,
            ("sender", 1, "fingerprint"),
            self._ended.put,
            lease_s=TIMEOUT_S,
            num_streams=num_streams,
            curve=Curve(pair) if pair else None,
        )
        self._sender.start()

    def run(self) -> float:
        """Seconds from the announcement of the blocks to the acknowledgement of all. Raises RuntimeError."""
        kv_frames.checksum = CHECKSUM if self._checksum else _no_checksum
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
        """Of the process that was started last."""
        return self._processes[-1].pid or 0

    def __enter__(self) -> Receivers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join(10.0)
            process.kill()
            process.join(10.0)
