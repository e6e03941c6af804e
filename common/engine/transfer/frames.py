"""KV blocks on ZeroMQ: how frames leave one worker's memory and arrive in another's.

One multipart message carries a `KVBlocks` header and one raw frame a block. Sending copies nothing: the frames point
into the KV cache, whose memory outlives every socket. Receiving writes each frame into the block reserved for it.
Between workers that share memory the header travels alone and names the blocks, and the receiver copies them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import zmq

from common.engine.kv import checksum as checksum
from common.wire import encode
from common.wire.messages import MAX_BLOCKS_PER_FRAME, KVBlocks, Message

FRAME_TARGET_BYTES = 2 * 1024 * 1024
"""About how many bytes of blocks go into one message."""
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""More than any block has: ZeroMQ closes the connection of a peer that announces a larger frame."""
MAX_REPLY_BYTES = 64 * 1024
"""Answers to transfers are small; only blocks are large."""
SEND_HWM = 16
"""Messages that a sender may queue for one decode worker: bounds how far it runs ahead of a slow receiver."""

QUEUED_BYTES = 64 * 1024 * 1024
"""Of blocks in all sockets of a sender: two full queues of messages that have `FRAME_TARGET_BYTES`."""


def blocks_per_message(block_bytes: int) -> int:
    """How many blocks share one message: enough for an efficient stream, few enough to start early."""
    return max(1, min(MAX_BLOCKS_PER_FRAME, FRAME_TARGET_BYTES // max(1, block_bytes)))


def blocks_in_queues(block_bytes: int) -> int:
    """How many blocks wait in a sender's sockets at once, usually: pinned buffers of a GPU's worker are for so many."""
    return max(2 * blocks_per_message(block_bytes), QUEUED_BYTES // max(1, block_bytes))


def dealer(context: zmq.Context[zmq.Socket[bytes]], most_bytes: int = MAX_REPLY_BYTES) -> zmq.Socket[bytes]:
    """A DEALER for KV, not connected yet, with bounded queues. Closing it drops what is queued.

    A frame that comes has `most_bytes` at most.
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
    """What the socket can do now without waiting: zmq.POLLIN, zmq.POLLOUT or both."""
    return int(socket.getsockopt(zmq.EVENTS))


def try_send(socket: zmq.Socket[bytes], message: Message) -> bool:
    """Send a message without frames; False when the socket's queue is full."""
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
    """Ship `blocks` as one message without copying them; False when the socket's queue is full.

    `token` is the grant's. With `sources`, the numbers of blocks or places in shared memory, only these travel, and
    their `checksums` if these are known. ZeroMQ accepts or refuses a multipart message at its first part, so it never
    queues half a message.
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
    """Receive the frames that follow `header`: the block indices that arrived intact, and what was wrong (or "").

    `destination` maps a block index to the memory reserved for it, or None for a frame to drop. Every part of the
    message is consumed in any case, so that the next message starts at its first part.
    """
    received: list[int] = []
    problem = ""
    for offset, expected in enumerate(header.checksums):
        if not socket.getsockopt(zmq.RCVMORE):
            return received, problem or f"{len(header.checksums)} blocks announced, {offset} came"
        index = header.first_block + offset
        target = destination(index)
        if target is None:
            discard_part(socket)
            continue
        size = socket.recv_into(target)
        if size != len(target):
            problem = problem or f"block {index} has {size} bytes, not {len(target)}"
        elif checksum(target) != expected:
            problem = problem or f"block {index} is corrupt: its checksum does not match"
        else:
            received.append(index)
    extra = discard_rest(socket)
    if extra:
        problem = problem or f"{extra} frames beyond the {len(header.checksums)} announced"
    return received, problem


def read_block(read: Callable[[int, memoryview], bool], source: int, target: memoryview) -> int | None:
    """Copy a block into `target` with `read`; the checksum of the copy, None when there is no such block."""
    return checksum(target) if read(source, target) else None


def copy_blocks(
    header: KVBlocks,
    copy: Callable[[Iterable[tuple[int, int]]], Iterable[int | None]],
    wants: Callable[[int], bool],
) -> tuple[list[int], str]:
    """Copy the blocks that `header` names: the block indices that were copied intact, and what was wrong (or "").

    `copy` takes (source, index) pairs, copies these blocks of the sender's, and says in turn the checksum of the bytes
    that it copied; None when the sender has no block of that number. The checksum is wrong for a block that the sender
    reused meanwhile.
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
            return received, f"block {index} is to be copied from block {source}, which cannot be read"
        if found != expected:
            return received, f"block {index} is corrupt, or its sender took it back while it was copied"
        received.append(index)
    return received, ""


def discard_part(socket: zmq.Socket[bytes]) -> None:
    """Drop one message part without copying it."""
    socket.recv(copy=False)


def discard_rest(socket: zmq.Socket[bytes]) -> int:
    """Drop the remaining parts of the current message; how many there were."""
    count = 0
    while socket.getsockopt(zmq.RCVMORE):
        discard_part(socket)
        count += 1
    return count
