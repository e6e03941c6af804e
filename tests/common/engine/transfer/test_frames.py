"""How frames leave one memory and arrive in another, on real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from common.engine.transfer.frames import (
    FRAME_TARGET_BYTES,
    MAX_REPLY_BYTES,
    SEND_HWM,
    blocks_per_message,
    checksum,
    dealer,
    events,
    receive_blocks,
    try_send,
    try_send_blocks,
)
from common.wire.codec import decode
from common.wire.messages import MAX_BLOCKS_PER_FRAME, KVBlocks, KVWait

WAIT = KVWait(request_id="a", attempt=0)
Socket = zmq.Socket[bytes]


@pytest.fixture
def pair() -> Iterator[tuple[Socket, Socket]]:
    """A dealer and the socket that it is connected to."""
    context: zmq.Context[Socket] = zmq.Context()
    receiver = context.socket(zmq.DEALER)
    receiver.set(zmq.RCVHWM, 1)
    receiver.bind("tcp://127.0.0.1:*")
    sender = dealer(context)
    sender.connect(receiver.get_string(zmq.LAST_ENDPOINT))
    yield sender, receiver
    sender.close()
    receiver.close(linger=0)
    context.term()


def ship(sender: Socket, blocks: list[bytes], first: int = 0) -> None:
    assert try_send_blocks(sender, "a", 0, first, [memoryview(block) for block in blocks])


def receive(receiver: Socket, memory: list[bytearray]) -> tuple[list[int], str]:
    assert receiver.poll(60_000)
    header = decode(receiver.recv())
    assert isinstance(header, KVBlocks)
    wanted = {index: memoryview(block) for index, block in enumerate(memory)}
    return receive_blocks(receiver, header, wanted.get)


@pytest.mark.parametrize(
    ("block_bytes", "expected"),
    [(1, MAX_BLOCKS_PER_FRAME), (2**20, FRAME_TARGET_BYTES // 2**20), (2**30, 1), (0, MAX_BLOCKS_PER_FRAME)],
)
def test_messages_are_neither_tiny_nor_huge(block_bytes: int, expected: int) -> None:
    assert blocks_per_message(block_bytes) == expected


@pytest.mark.parametrize("size", [1, 64, 2**20])
def test_blocks_land_in_place(pair: tuple[Socket, Socket], size: int) -> None:
    blocks = [bytes([n]) * size for n in (1, 2, 3)]
    memory = [bytearray(size) for _ in range(4)]
    ship(pair[0], blocks, first=1)
    assert receive(pair[1], memory) == ([1, 2, 3], "")
    assert [bytes(block) for block in memory] == [bytes(size), *blocks]


def test_unwanted_blocks_are_discarded_and_the_next_message_is_whole(pair: tuple[Socket, Socket]) -> None:
    ship(pair[0], [b"x" * 64] * 3, first=7)
    ship(pair[0], [b"y" * 64])
    memory = [bytearray(64)]
    assert receive(pair[1], memory) == ([], "")
    assert receive(pair[1], memory) == ([0], "")


def test_a_frame_never_writes_beyond_its_block(pair: tuple[Socket, Socket]) -> None:
    ship(pair[0], [b"x" * 100])
    memory = bytearray(128)
    header = decode(pair[1].recv())
    assert isinstance(header, KVBlocks)
    received, problem = receive_blocks(pair[1], header, lambda index: memoryview(memory)[:64])
    assert (received, problem) == ([], "block 0 has 100 bytes instead of 64")
    assert not any(memory[64:])


def test_a_full_queue_refuses_whole_messages(pair: tuple[Socket, Socket]) -> None:
    block = memoryview(b"x" * FRAME_TARGET_BYTES)
    sent = 0
    while sent < 10 * SEND_HWM:
        if try_send_blocks(pair[0], "a", 0, sent, [block]):
            sent += 1
        elif not pair[0].poll(300, zmq.POLLOUT):  # what the wire still had room for has left
            break
    assert not events(pair[0]) & zmq.POLLOUT and not try_send(pair[0], WAIT)
    assert SEND_HWM <= sent < 10 * SEND_HWM
    for number in range(sent):
        header = decode(pair[1].recv())
        assert isinstance(header, KVBlocks) and header.first_block == number
        assert pair[1].recv(copy=False).buffer.nbytes == FRAME_TARGET_BYTES


def test_a_peer_that_answers_too_much_is_cut_off(pair: tuple[Socket, Socket]) -> None:
    assert try_send(pair[0], WAIT)
    pair[1].recv()
    pair[1].send(b"x" * (MAX_REPLY_BYTES + 1))
    assert not pair[0].poll(100)


def test_the_checksum_sees_every_bit() -> None:
    block = bytearray(4096)
    sums = {checksum(memoryview(block))}
    for position in range(0, 4096, 512):
        block[position] ^= 1
        sums.add(checksum(memoryview(block)))
    assert len(sums) == 9
