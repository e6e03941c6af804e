"""Access of rank 0 to the KV memory of other ranks.

On its own host, rank 0 maps a memory file of a CPU rank, or opens the CUDA handle of a GPU rank. KV heads of a rank on
another host are read and written over a separate connection.

    rank 0   READ blocks, heads ──>                             WRITE blocks, bytes ──>
    rank r                          <── bytes of these heads                            <── done

An order is for a group of blocks of a few MiB and has one answer, so a message costs one round trip. A thread of the
rank executes orders sequentially, concurrently with its steps. Neither has to wait for the other's steps:

- Rank 0 reads a block after the steps that wrote it are complete. A step is complete when its last collective is, which
  a rank joins after all writes of the step (on a GPU, in the same stream).
- Rank 0 sends no step that reads a block before the rank has answered "done". The rank does so once the bytes are in
  the cache (on a GPU, when the copy stream has finished).
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from common.engine.kv import (
    CopyStream,
    KVCache,
    ShardedCache,
    blocks_at_once,
    incoming_blocks,
    outgoing_blocks,
    segments,
)
from common.engine.ranks.channel import Channel
from common.errors import BlockError, RankLost, WireError

log = logging.getLogger(__name__)
TIMEOUT_S = 30.0
READ, WRITE, CLEAR = 1, 2, 3
ORDER = struct.Struct("<BIII")
"""Kind, number of blocks, first head (CLEAR: first slot), number of heads. The block numbers follow."""
INDEX = struct.Struct("<I")
DONE = b"\1"
ORDER_S = 30.0
"""Maximum time, in seconds, to execute an order, and to send its bytes."""


def share_kv_memory(kv: KVCache, channel: Channel) -> None:
    """Share the memory of `kv` with rank 0. It must stay allocated. Raises RankLost."""
    if kv.shared is not None:
        channel.send_descriptor(kv.shared.offer.fd, TIMEOUT_S)
    else:
        handle = kv.tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        channel.send(msgspec.msgpack.encode(handle), TIMEOUT_S)


def map_kv_memory(kv: ShardedCache, channel: Channel) -> None:
    """Map the memory of the next rank of `kv` on rank 0. Raises ModelError, OSError or RankLost."""
    if kv.device.type == "cuda":
        handle: list[Any] = msgspec.msgpack.decode(channel.receive(TIMEOUT_S))  # the first element is the device number
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        part = torch.empty(0, dtype=kv.dtype, device=f"cuda:{handle[0]}").set_(storage)
        kv.attach(part.view(kv.tensor.shape))
        return
    descriptor = channel.receive_descriptor(TIMEOUT_S)
    try:
        kv.attach_file(descriptor)
    finally:
        os.close(descriptor)


class RemoteKVHeads:
    """Implementation of `RemoteHeads` for the rank at the other end of `channel`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ask(self, indices: Sequence[int], heads: range) -> None:
        self._order(READ, indices, heads.start, len(heads))

    def take(self, parts: Sequence[memoryview]) -> None:
        self._channel.receive_parts(parts, ORDER_S)

    def put(self, indices: Sequence[int]) -> None:
        self._order(WRITE, indices, 0, 0)

    def give(self, parts: Sequence[memoryview]) -> None:
        self._channel.send_parts(parts, ORDER_S)

    def clear(self, index: int, first_slot: int) -> None:
        self._order(CLEAR, [index], first_slot, 0)

    def confirm(self) -> None:
        self._channel.receive_parts([memoryview(bytearray(len(DONE)))], ORDER_S)

    def cut(self) -> None:
        self._channel.cut()

    def _order(self, kind: int, indices: Sequence[int], first: int, count: int) -> None:
        order = ORDER.pack(kind, len(indices), first, count) + b"".join(map(INDEX.pack, indices))
        self._channel.send_parts([memoryview(order)], ORDER_S)


def serve_kv_heads(kv: KVCache, channel: Channel) -> None:
    """Execute orders of rank 0 on a separate thread, until rank 0 is gone or sends an invalid order.

    Then cuts the connection, and rank 0 stops the worker.
    """
    try:
        _execute_orders(kv, channel)
    except RankLost:
        pass  # rank 0 is gone or stops this worker
    except Exception:
        log.exception("KV access of rank 0 failed, the worker will stop")
    channel.cut()


def _execute_orders(kv: KVCache, channel: Channel) -> None:
    """Execute orders. Raises RankLost, BlockError or WireError."""
    at_once = blocks_at_once(kv.block_bytes)
    outgoing, incoming, stream = outgoing_blocks(kv), incoming_blocks(kv, at_once), CopyStream(kv.device)
    layers, total = kv.config.num_layers, kv.config.num_kv_heads
    order = bytearray(ORDER.size)
    while True:
        channel.receive_parts([memoryview(order)], None)
        kind, num_blocks, first, count = ORDER.unpack(order)
        if not 0 < num_blocks <= at_once:
            raise WireError(f"order {kind} names {num_blocks} blocks of {kv.block_bytes:,} bytes")
        indices = _indices(channel, num_blocks, kv.num_blocks)
        if kind == READ and 0 < count <= total - first:
            for index in indices:
                view = outgoing.view(index)
                channel.send_parts(segments(view, layers, total, range(first, first + count)), ORDER_S)
                del view  # releases its buffer
        elif kind == WRITE:
            for index in indices:
                channel.receive_parts([incoming.view(index)], ORDER_S)
            incoming.commit(indices)
            channel.send_parts([memoryview(DONE)], ORDER_S)
        elif kind == CLEAR and first < kv.block_size:
            stream.wait_for(lambda indices=indices, first=first: _clear(kv, indices, first))  # type: ignore[misc]
            channel.send_parts([memoryview(DONE)], ORDER_S)
        else:
            raise WireError(f"order {kind} names {count} heads or slots from {first} of {total}")


def _indices(channel: Channel, count: int, num_blocks: int) -> list[int]:
    """Read the block numbers of an order. Raises RankLost or BlockError."""
    body = bytearray(count * INDEX.size)
    channel.receive_parts([memoryview(body)], ORDER_S)
    indices = [index for (index,) in INDEX.iter_unpack(body)]
    if max(indices) >= num_blocks:
        raise BlockError(f"block {max(indices)} is not one of {num_blocks} blocks")
    return indices


def _clear(kv: KVCache, indices: Sequence[int], first: int) -> None:
    for index in indices:
        kv.clear_slots(index, first)
