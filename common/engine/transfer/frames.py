"""KV blocks over ZeroMQ.

A multipart message consists of a `KVBlocks` header and one raw frame per block. Sending is zero-copy: frames point into
the KV cache, whose memory outlives every socket. Receiving writes each frame into the block reserved for it. Between
workers that share memory, only the header is sent. It names the blocks, and the receiver copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import zmq

from common.engine.kv import checksum as checksum
from common.wire import encode
from common.wire.messages import MAX_BLOCKS_PER_FRAME, KVBlocks, Message

FRAME_TARGET_BYTES = 2 * 1024 * 1024
"""Target size of the blocks in one message."""
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Maximum frame size, larger than any block. ZeroMQ disconnects a peer that announces a larger frame."""
MAX_REPLY_BYTES = 64 * 1024
"""Maximum size of replies, which contain no blocks."""
SEND_HWM = 16
"""Messages that a sender may queue for one decode worker. Bounds how far it runs ahead of a slow receiver."""

QUEUED_BYTES = 64 * 1024 * 1024
"""Typical bytes of blocks in all sockets of a sender: two full queues of `FRAME_TARGET_BYTES` messages."""


def blocks_per_message(block_bytes: int) -> int:
    """Return the blocks per message: enough for throughput, few enough to start early."""
    return max(1, min(MAX_BLOCKS_PER_FRAME, FRAME_TARGET_BYTES // max(1, block_bytes)))


def blocks_in_queues(block_bytes: int) -> int:
    """Return the typical maximum of blocks queued in a sender's sockets, which sizes a GPU worker's pinned buffers."""
    return max(2 * blocks_per_message(block_bytes), QUEUED_BYTES // max(1, block_bytes))


def dealer(context: zmq.Context[zmq.Socket[bytes]], most_bytes: int = MAX_REPLY_BYTES) -> zmq.Socket[bytes]:
    """Create an unconnected DEALER socket for KV with bounded queues. Closing it drops queued messages.

    `most_bytes`: maximum size of incoming frames.
    """
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, SEND_HWM)
    socket.set(zmq.RCVHWM, 4096)
    socket.set(zmq.MAXMSGSIZE, most_bytes)
    socket.set(zmq.SNDBUF, 4 * 1024 * 1024)
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def events(socket: zmq.Socket[bytes]) -> int:
    """Return what the socket can do without blocking: zmq.POLLIN, zmq.POLLOUT or both."""
    return int(socket.getsockopt(zmq.EVENTS))


def try_send(socket: zmq.Socket[bytes], message: Message) -> bool:
    """Send a message without frames; False if the socket's queue is full."""
    try:
        socket.send(encode(message), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def try_send_blocks(
    socket: zmq.Socket[bytes],
    request_id: str,
    attempt: int,
    first_block: int,
    blocks: Sequence[memoryview],
    sources: Sequence[int] = (),
    token: int = 0,
    checksums: Sequence[int] = (),
) -> bool:
    """Send `blocks` as one message, zero-copy; False if the socket's queue is full.

    `token` is the token of the grant. With `sources` (block numbers or slots in shared memory), no frames are sent;
    `checksums` are computed from `blocks` if not given. ZeroMQ accepts or rejects a multipart message at its first
    part, so it never queues a partial message.
    """
    if not events(socket) & zmq.POLLOUT:
        return False
    header = KVBlocks(
        request_id=request_id,
        attempt=attempt,
        first_block=first_block,
        checksums=tuple(checksums) or tuple(checksum(block) for block in blocks),
        sources=tuple(sources),
        token=token,
    )
    if sources:
        return try_send(socket, header)
    try:
        socket.send(encode(header), zmq.NOBLOCK | zmq.SNDMORE)
    except zmq.Again:
        return False
    for block in blocks[:-1]:
        socket.send(block, zmq.SNDMORE, copy=False)
    socket.send(blocks[-1], copy=False)
    return True


def receive_blocks(
    socket: zmq.Socket[bytes], header: KVBlocks, destination: Callable[[int], memoryview | None]
) -> tuple[list[int], str]:
    """Receive the frames that follow `header`.

    Returns the indices of the blocks received intact and a description of the first problem, or "". `destination` maps
    a block index to its memory, or to None to drop the frame. The whole message is always consumed, so that the next
    one starts at its first part.
    """
    received: list[int] = []
    problem = ""
    for offset, expected in enumerate(header.checksums):
        if not socket.getsockopt(zmq.RCVMORE):
            return received, problem or f"{len(header.checksums)} blocks announced, {offset} received"
        index = header.first_block + offset
        target = destination(index)
        if target is None:
            discard_part(socket)
            continue
        size = socket.recv_into(target)
        if size != len(target):
            problem = problem or f"block {index} has {size} bytes instead of {len(target)}"
        elif checksum(target) != expected:
            problem = problem or f"block {index} is corrupt: checksum mismatch"
        else:
            received.append(index)
    extra = discard_rest(socket)
    if extra:
        problem = problem or f"{extra} frames more than the {len(header.checksums)} announced"
    return received, problem


def read_block(read: Callable[[int, memoryview], bool], source: int, target: memoryview) -> int | None:
    """Copy a block into `target` with `read`. Returns the checksum of the copy, None if the block does not exist."""
    return checksum(target) if read(source, target) else None


def copy_blocks(
    header: KVBlocks,
    copy: Callable[[Iterable[tuple[int, int]]], Iterable[int | None]],
    wants: Callable[[int], bool],
) -> tuple[list[int], str]:
    """Copy the blocks named in `header` from the sender's memory.

    Returns the indices of the blocks copied intact and a description of the problem, or "". `copy` takes (source,
    index) pairs and yields, in order, the checksum of each copy, or None if the source does not exist. The checksum
    differs if the sender reused the block during the copy.
    """
    received: list[int] = []
    if len(header.sources) != len(header.checksums):
        return received, f"{len(header.checksums)} checksums for {len(header.sources)} blocks"
    asked: list[tuple[int, int, int]] = []

    def wanted() -> Iterator[tuple[int, int]]:
        for index, (source, expected) in enumerate(
            zip(header.sources, header.checksums, strict=True), header.first_block
        ):
            if wants(index):
                asked.append((source, index, expected))
                yield source, index

    for place, found in enumerate(copy(wanted())):
        source, index, expected = asked[place]
        if found is None:
            return received, f"block {index}: source block {source} cannot be read"
        if found != expected:
            return received, f"block {index} is corrupt, or its sender reused it during the copy"
        received.append(index)
    return received, ""


def discard_part(socket: zmq.Socket[bytes]) -> None:
    """Drop one message part without copying it."""
    socket.recv(copy=False)


def discard_rest(socket: zmq.Socket[bytes]) -> int:
    """Drop the remaining parts of the current message and return their number."""
    count = 0
    while socket.getsockopt(zmq.RCVMORE):
        discard_part(socket)
        count += 1
    return count
