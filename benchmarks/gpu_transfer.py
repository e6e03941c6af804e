"""KV blocks off one device cache and into another: pinned copies alone, and the workers' own sender and receiver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
import zmq

from benchmarks import raw_tcp
from benchmarks.gpu_shape import SHAPES, GPUShape
from benchmarks.gpu_timer import Timer
from benchmarks.kv_wire import TIMEOUT_S, Peers
from common.kv.cache import KVCache
from common.kv.staging import CopyStream, StagedIncoming, StagedOutgoing, block_bytes_of
from common.machine.allocator import keep_large_buffers
from common.transfer.incoming import IncomingTransfer
from common.transfer.outgoing import TransferEnded
from common.transfer.receiver import KVReceiver, TransferCompleted, TransferFailed, TransferOpened
from common.transfer.sender import KVSender
from common.wire.messages import KVDone, KVGrant, KVTarget

ROUNDS = 5
RAW_WRITE_BYTES = 2**20


def measure_transfer(shape: GPUShape, timer: Timer) -> Iterator[dict[str, Any]]:
    """GB/s of each path. Raises RuntimeError when blocks did not arrive as they were."""
    kv = _cache(shape, timer.device)
    kv.tensor.normal_()
    if kv.device.type == "cuda":
        torch.cuda.synchronize(kv.device)  # copies run on streams of their own
    yield from pinned_rows(kv, timer)
    yield from shipping_rows(shape, kv)


def pinned_rows(kv: KVCache, timer: Timer) -> Iterator[dict[str, Any]]:
    """Copies of whole blocks on a stream of their own, block by block as the workers make them, and waited for."""
    stream = CopyStream(kv.device)
    buffers = [stream.buffer(kv.block_bytes) for _ in range(kv.num_blocks)]
    blocks = [block_bytes_of(kv, index) for index in range(kv.num_blocks)]
    num_bytes = kv.num_blocks * kv.block_bytes
    for path, targets, sources in (("device to pinned", buffers, blocks), ("pinned to device", blocks, buffers)):
        together = timer.waited(lambda t=targets, s=sources: stream.run(list(zip(t, s, strict=True))))  # type: ignore[misc]
        single = timer.waited(lambda t=targets, s=sources: stream.run([(t[0], s[0])]))  # type: ignore[misc]
        yield {"path": path, "gb_per_s": _rate(num_bytes, together), "one_block": _rate(kv.block_bytes, single)}


def shipping_rows(shape: GPUShape, kv: KVCache) -> list[dict[str, Any]]:
    """Device to device through two processes and loopback TCP, handshake and acknowledgement included."""
    num_bytes = kv.num_blocks * kv.block_bytes
    with Peers() as peers:
        port = peers.start(raw_tcp.serve, num_bytes)
        address = peers.start(serve_blocks, shape.name, str(kv.device))
        flat = memoryview(bytearray(num_bytes))
        raw = min(raw_tcp.send(port, flat, num_bytes, RAW_WRITE_BYTES) for _ in range(ROUNDS))
        shipped = min(ship(kv, address) for _ in range(2))
    return [
        {"path": "raw TCP, 1 MiB writes", "gb_per_s": _rate(num_bytes, raw)},
        {"path": "KV, device to device", "gb_per_s": _rate(num_bytes, shipped), "of_raw": round(raw / shipped, 3)},
    ]


def ship(kv: KVCache, address: str) -> float:
    """Seconds of the fastest of a few transfers of the whole cache."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ended: SimpleQueue[TransferEnded] = SimpleQueue()
    view = StagedOutgoing(kv, CopyStream(kv.device)).view
    sender = KVSender(
        context, view, kv.block_bytes, ("sender", 1, "fingerprint"), ended.put, lease_s=TIMEOUT_S, num_streams=1
    )
    sender.start()
    samples, count = [], kv.num_blocks
    try:
        for number in range(ROUNDS):
            name, began = f"{id(context)}-{number}", time.perf_counter()
            sender.open(name, 0, KVTarget("receiver", 1, address), list(range(count)), count)
            sender.progress(name, 0, count, KVDone(request_id=name, attempt=0, first_token=0))
            reason = ended.get(timeout=TIMEOUT_S).reason
            samples.append(time.perf_counter() - began)
            if reason:
                raise RuntimeError(f"a transfer ended: {reason}")
    finally:
        sender.stop()
        context.term()
    return min(samples)


def serve_blocks(pipe: Connection, shape_name: str, device: str) -> None:
    """Body of the receiving process: grants what is announced, into its own cache on the device."""
    keep_large_buffers()  # as a worker does
    kv = _cache(SHAPES[shape_name], torch.device(device))
    blocks = StagedIncoming(kv, CopyStream(kv.device))
    events: SimpleQueue[TransferOpened | TransferCompleted | TransferFailed] = SimpleQueue()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = KVReceiver(context, "127.0.0.1", 0, blocks.view, events.put, share=False, commit=blocks.commit)
    receiver.start()
    pipe.send(receiver.address)
    while True:
        match events.get():
            case TransferOpened(peer, opened, now):
                name, attempt = opened.request_id, opened.attempt
                receiver.expect(IncomingTransfer(name, attempt, peer, range(opened.num_blocks), 0, now, now))
                receiver.send(peer, KVGrant(request_id=name, attempt=attempt, first_block=0))
            case TransferFailed(reason=reason):
                raise RuntimeError(reason)


def _cache(shape: GPUShape, device: torch.device) -> KVCache:
    return KVCache(shape.config, 4 * shape.moved_blocks, shape.block_size, shape.dtype, device)


def _rate(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3)
