"""Frames over TCP: supported by every worker, and the fallback of the other transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.engine.transfer.transports.interface import PreparedBlocks, TransferCache, Transport

if TYPE_CHECKING:
    from common.engine.kv import IncomingBlocks, OutgoingBlocks
    from common.engine.transfer.sender import OutgoingTransfer


class TcpTransport(Transport):
    """Offers and accepts nothing: all blocks are sent as frames."""

    name = "tcp"

    def outgoing(self, kv: TransferCache, blocks: OutgoingBlocks, frames: Frames) -> None:
        return None

    def incoming(self, kv: TransferCache, blocks: IncomingBlocks) -> None:
        return None


@dataclass(slots=True)
class Frames:
    """Reads blocks for frames, on the sender's thread.

    `view` reads one block, `views` all blocks of a message where reading them together is faster. `quantise` reads the
    blocks of a message as 8-bit integers, for receivers that accept them; None: not offered.
    """

    view: Callable[[int], memoryview]
    views: Callable[[Sequence[int]], Sequence[memoryview]] | None = None
    quantise: Callable[[Sequence[int]], Sequence[memoryview]] | None = None

    def read(self, blocks: Sequence[int]) -> Sequence[memoryview]:
        return self.views(blocks) if self.views is not None else [self.view(block) for block in blocks]

    def ship(self, transfer: OutgoingTransfer, indices: range) -> PreparedBlocks:
        """Prepare the blocks `indices` of a transfer, as 8-bit integers if it is quantised."""
        blocks = [transfer.blocks[index] for index in indices]
        quantise = self.quantise if transfer.quantised else None
        views = quantise(blocks) if quantise is not None else self.read(blocks)
        return PreparedBlocks(indices, sum(map(len, views)), views)
