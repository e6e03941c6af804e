"""Frames over TCP: the transport that every worker has, and to which the others fall back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.engine.transfer.transports.interface import Parcel, Transport

if TYPE_CHECKING:
    from common.engine.kv import IncomingBlocks, KVCache, OutgoingBlocks
    from common.engine.transfer.sender import OutgoingTransfer


class TcpTransport(Transport):
    """Offers and accepts nothing: all blocks travel as frames."""

    name = "tcp"

    def outgoing(self, kv: KVCache, blocks: OutgoingBlocks, frames: Frames) -> None:
        return None

    def incoming(self, kv: KVCache, blocks: IncomingBlocks) -> None:
        return None


@dataclass(slots=True)
class Frames:
    """Reads blocks for frames, on the sender's thread.

    `view` reads one block, `views` all blocks of a message where it is faster to read them together. `quantise` reads
    the blocks of a message as 8-bit numbers, for receivers that accept these; None: they are not offered.
    """

    view: Callable[[int], memoryview]
    views: Callable[[Sequence[int]], Sequence[memoryview]] | None = None
    quantise: Callable[[Sequence[int]], Sequence[memoryview]] | None = None

    def read(self, blocks: Sequence[int]) -> Sequence[memoryview]:
        return self.views(blocks) if self.views is not None else [self.view(block) for block in blocks]

    def ship(self, transfer: OutgoingTransfer, indices: range) -> Parcel:
        """Prepare the blocks `indices` of a transfer, as 8-bit numbers if it is quantised."""
        blocks = [transfer.blocks[index] for index in indices]
        quantise = self.quantise if transfer.quantised else None
        views = quantise(blocks) if quantise is not None else self.read(blocks)
        return Parcel(indices, sum(map(len, views)), views)
