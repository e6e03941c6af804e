"""In which way the blocks of a message leave, and how many of them are read at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.engine.transfer.outgoing import OutgoingTransfer, Way
from common.engine.transfer.shipping import Shipping
from common.wire.messages import KVTarget


def transfer(way: Way) -> OutgoingTransfer:
    return OutgoingTransfer("a", 0, KVTarget("d", 1, "tcp://x"), (7, 2, 30, 11), 0.0, 1.0, num_ready=4, way=way)


def alone(block: int) -> memoryview:
    pytest.fail(f"block {block} is read alone")


def test_blocks_of_a_message_are_read_together_where_that_is_faster() -> None:
    asked: list[Sequence[int]] = []

    def views(blocks: Sequence[int]) -> list[memoryview]:
        asked.append(blocks)
        return [memoryview(bytes([block])) for block in blocks]

    parcel = Shipping(alone, views=views).parcel(transfer(Way.FRAMES), range(1, 4))
    assert asked == [[2, 30, 11]]
    assert parcel is not None
    assert [bytes(view) for view in parcel.views] == [b"\x02", b"\x1e", b"\x0b"] and parcel.num_bytes == 3


def test_blocks_of_8_bits_are_quantised_together() -> None:
    asked: list[Sequence[int]] = []

    def quantise(blocks: Sequence[int]) -> list[memoryview]:
        asked.append(blocks)
        return [memoryview(bytes([block])) for block in blocks]

    shipping = Shipping(alone, quantise=quantise, views=lambda blocks: pytest.fail("read"))
    parcel = shipping.parcel(transfer(Way.SMALL_FRAMES), range(2))
    assert parcel is not None
    assert [bytes(view) for view in parcel.views] == [b"\x07", b"\x02"] and asked == [[7, 2]]
