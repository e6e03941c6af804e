"""KV blocks from one device cache to another: pinned copies alone, and the workers' own sender and receiver."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
import zmq

from benchmarks.gpu import raw_tcp
from benchmarks.gpu.block_path import BlockPath, Events, Receivers, Shape, grant_all
from benchmarks.gpu.shape import SHAPES, GPUShape
from benchmarks.gpu.timer import Timer
from common.engine.kv.block_ring import ring_for
from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream, RegistrationError
from common.engine.kv.staging import StagedIncoming, StagedOutgoing, block_bytes_of
from common.engine.transfer.frames import blocks_in_queues, blocks_per_message
from common.engine.transfer.receiver import KVListener, KVReceiver
from common.engine.transfer.transports.shm import PeerMemory, RingSlotSource, SharedBlocks, SharedReads
from common.engine.transfer.transports.tcp import Frames
from common.machine.memory import keep_large_buffers

ROUNDS = 5
RAW_WRITE_BYTES = 2**20


def measure_transfer(shape: GPUShape, timer: Timer) -> Iterator[dict[str, Any]]:
    """GB/s of each path. Raises RuntimeError when a transfer fails."""
    kv = _cache(shape, timer.device)
    kv.tensor.normal_()
    if kv.device.type == "cuda":
        torch.cuda.synchronize(kv.device)  # copies run on streams of their own
    yield from pinned_rows(kv, timer)
    yield from shipping_rows(shape, kv)


def pinned_rows(kv: KVCache, timer: Timer) -> Iterator[dict[str, Any]]:
    """Copies of whole blocks on a stream of their own, block by block as in the workers, and waited for."""
    stream = CopyStream(kv.device)
    buffers = stream.buffers(kv.block_bytes, kv.num_blocks)
    blocks = [block_bytes_of(kv, index) for index in range(kv.num_blocks)]
    num_bytes = kv.num_blocks * kv.block_bytes
    for path, targets, sources in (("device to pinned", buffers, blocks), ("pinned to device", blocks, buffers)):
        together = timer.waited(lambda t=targets, s=sources: stream.run(list(zip(t, s, strict=True))))  # type: ignore[misc]
        single = timer.waited(lambda t=targets, s=sources: stream.run([(t[0], s[0])]))  # type: ignore[misc]
        yield {"path": path, "gb_per_s": _rate(num_bytes, together), "one_block": _rate(kv.block_bytes, single)}


def shipping_rows(shape: GPUShape, kv: KVCache) -> list[dict[str, Any]]:
    """Device to device through two processes, in frames over loopback TCP and through a ring in shared memory.

    Handshake and acknowledgement are included. `direct`: the driver registers the ring at the receiver too, whose
    device then copies out of it without a buffer.
    """
    num_bytes = kv.num_blocks * kv.block_bytes
    with Receivers() as receivers:
        port = receivers.start(raw_tcp.serve, num_bytes)
        address = receivers.start(serve_blocks, shape.name, str(kv.device))
        flat = memoryview(bytearray(num_bytes))
        raw = min(raw_tcp.send(port, flat, num_bytes, RAW_WRITE_BYTES) for _ in range(ROUNDS))
        shipped = min(ship(kv, address) for _ in range(2))
        through_ring = min(ship(kv, address, in_ring=True) for _ in range(2))
    ring_rate, direct = _rate(num_bytes, through_ring), is_direct(kv)
    return [
        {"path": "raw TCP, 1 MiB writes", "gb_per_s": _rate(num_bytes, raw)},
        {"path": "KV, device to device", "gb_per_s": _rate(num_bytes, shipped), "of_raw": round(raw / shipped, 3)},
        {"path": "KV, device to device through a ring", "gb_per_s": ring_rate, "direct": direct},
    ]


def is_direct(kv: KVCache) -> bool:
    """Whether the device of `kv` reaches memory that this process may only read."""
    ring = ring_for(StagedOutgoing(kv, CopyStream(kv.device)), 1)
    memory = PeerMemory(ring.offer)
    try:
        RingSlotSource(StagedIncoming(kv, CopyStream(kv.device)), memory).close()
    except RegistrationError:
        return False
    finally:
        memory.close()
        ring.close()
    return True


def ship(kv: KVCache, address: str, *, in_ring: bool = False) -> float:
    """Seconds of the fastest of a few transfers of the whole cache."""
    outgoing = StagedOutgoing(kv, CopyStream(kv.device)).reserve(blocks_in_queues(kv.block_bytes))
    frames = Frames(outgoing.view)
    through = SharedBlocks(frames, ring=ring_for(outgoing, kv.num_blocks)) if in_ring else None
    path = BlockPath(address, Shape(kv.block_bytes, kv.num_blocks), frames, through)
    try:
        return min(path.run() for _ in range(ROUNDS))
    finally:
        path.close()


def serve_blocks(pipe: Connection, shape_name: str, device: str) -> None:
    """Body of the receiving process: grants every announcement, into its own cache on the device."""
    keep_large_buffers()  # as a worker does
    kv = _cache(SHAPES[shape_name], torch.device(device))
    blocks = StagedIncoming(kv, CopyStream(kv.device)).reserve(blocks_per_message(kv.block_bytes))
    events: Events = SimpleQueue()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reads = SharedReads(lambda memory: RingSlotSource(blocks, memory))
    receiver = KVReceiver(context, KVListener(context, "127.0.0.1", 0), blocks, events.put, transports=[reads])
    grant_all(pipe, receiver, events)


def _cache(shape: GPUShape, device: torch.device) -> KVCache:
    return KVCache(shape.config, 4 * shape.moved_blocks, shape.block_size, shape.dtype, device)


def _rate(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3)
