"""A device that copies as late as can be, and remembers which memory of the host it may reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from common.engine.kv.block_ring import BlockRing
from common.engine.kv.copy_stream import CopyStream, RegistrationError
from common.engine.kv.staging import StagedIncoming, StagedOutgoing
from common.engine.transfer.transports.shm import RingSlotSource

NUM_PARTS = 4


class LateStream(CopyStream):
    """Copies a part of a block when that part is waited for, and not before; `on_part` is called behind each.

    `refuses`: it registers no memory that is mapped read-only, as some drivers.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._refuses = refuses
        self.registered: dict[int, tuple[int, bool]] = {}
        self.num_parts = 0
        self.on_part: Callable[[], None] = lambda: None

    def in_parts(self, target: Tensor, source: Tensor) -> Iterator[slice]:
        assert any(self._reaches(each) for each in (target, source)), "memory that the device does not reach"
        size = -(-len(target) // NUM_PARTS)
        for begin in range(0, len(target), size):
            part = slice(begin, begin + size)
            target[part] = source[part]
            self.num_parts += 1
            self.on_part()
            yield part

    def register(self, memory: Tensor, *, read_only: bool = False) -> None:
        if read_only and self._refuses:
            raise RegistrationError("this driver registers no memory that is read-only")
        assert memory.data_ptr() not in self.registered, "registered twice"
        self.registered[memory.data_ptr()] = (len(memory), read_only)

    def unregister(self, memory: Tensor) -> None:
        del self.registered[memory.data_ptr()]

    def _reaches(self, memory: Tensor) -> bool:
        begin = memory.data_ptr()
        return any(
            start <= begin and begin + len(memory) <= start + size for start, (size, _) in self.registered.items()
        )


class DeviceBlocks:
    """Stands for a `KVCache` on a device: its blocks are the rows of uint8 [blocks, block_bytes], of numpy or torch."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows if isinstance(rows, Tensor) else torch.from_numpy(rows)
        self.block_bytes = rows.shape[1]

    def block_tensor(self, index: int) -> Tensor:
        return self._rows[index]


def ring_over(rows: Any, num_places: int, stream: CopyStream) -> BlockRing:
    """A ring for blocks on a device that `stream` copies from. The blocks are rows, as of `DeviceBlocks`."""
    blocks: Any = DeviceBlocks(rows)
    return BlockRing(StagedOutgoing(blocks, stream), num_places)


def reach_into(rows: Any, stream: CopyStream) -> Callable[[Any], RingSlotSource]:
    """What lets a receiver copy out of rings into blocks on a device."""
    blocks: Any = DeviceBlocks(rows)
    incoming = StagedIncoming(blocks, stream)
    return lambda memory: RingSlotSource(incoming, memory)
