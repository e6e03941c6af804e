"""Frames: how the blocks of a message are read, and how many of them at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.engine.transfer.sender import OutgoingTransfer
from common.engine.transfer.transports.tcp import Frames
from common.wire.messages import KVTarget


def transfer(*, quantised: bool = False) -> OutgoingTransfer:
    target = KVTarget("d", 1, "tcp://x")
    return OutgoingTransfer("a", 0, target, (7, 2, 30, 11), 0.0, 1.0, num_ready=4, quantised=quantised)


def alone(block: int) -> memoryview:
    pytest.fail(f"block {block} is read alone")


def test_blocks_of_a_message_are_read_together_where_that_is_faster() -> None:
    asked: list[Sequence[int]] = []

    def views(blocks: Sequence[int]) -> list[memoryview]:
        asked.append(blocks)
        return [memoryview(bytes([block])) for block in blocks]

    prepared = Frames(alone, views=views).ship(transfer(), range(1, 4))
    assert asked == [[2, 30, 11]]
    assert [bytes(view) for view in prepared.views] == [b"\x02", b"\x1e", b"\x0b"] and prepared.num_bytes == 3


def test_blocks_of_8_bits_are_quantised_together() -> None:
    asked: list[Sequence[int]] = []

    def quantise(blocks: Sequence[int]) -> list[memoryview]:
        asked.append(blocks)
        return [memoryview(bytes([block])) for block in blocks]

    frames = Frames(alone, quantise=quantise, views=lambda blocks: pytest.fail("read"))
    prepared = frames.ship(transfer(quantised=True), range(2))
    assert [bytes(view) for view in prepared.views] == [b"\x07", b"\x02"] and asked == [[7, 2]]
