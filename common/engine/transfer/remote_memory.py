"""Both ends of memory that is read with NIXL: what a worker offers, and how a receiver sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.transfer.nixl_agent import NixlAgent, NixlError, Region
from common.wire import MAX_REMOTE_BYTES
from common.wire.messages import KVRemote


class OfferedMemory:
    """Blocks of this worker, or places for them, that others may read until `close`."""

    def __init__(self, agent: NixlAgent, region: Region, *, is_ring: bool) -> None:
        """The memory must outlast this. Raises NixlError."""
        self._agent, self._registered = agent, agent.register(region)
        metadata = agent.metadata(self._registered)
        if len(metadata) > MAX_REMOTE_BYTES:
            agent.unregister(self._registered)
            raise NixlError(
                f"NIXL needs {len(metadata):,} bytes to tell of this host's networks, more than {MAX_REMOTE_BYTES:,}: "
                "name those for KV with UCX_NET_DEVICES"
            )
        self.offer = KVRemote(agent.name, metadata, *region, is_ring)

    def close(self) -> None:
        self._agent.unregister(self._registered)


@dataclass(slots=True, eq=False)
class RemoteMemory:
    """The reader's side of an offer. `failed`: why nothing is read from it any more, or ""."""

    offer: KVRemote
    failed: str = ""

    @property
    def is_ring(self) -> bool:
        return self.offer.is_ring

    def regions(self, sources: Sequence[int], block_bytes: int) -> list[Region] | None:
        """Where the blocks of these numbers are; None when one is beyond the memory."""
        offer = self.offer
        if any((source + 1) * block_bytes > offer.num_bytes for source in sources):
            return None
        return [(offer.address + source * block_bytes, block_bytes) for source in sources]


@dataclass(frozen=True, slots=True)
class LandedBlocks:
    """The blocks of one message, read into memory of this worker that is not the cache."""

    blocks: dict[int, memoryview]
    """By their numbers in the sender's memory."""

    def read(self, source: int, target: memoryview) -> bool:
        """Copy a block to `target`, as large as it is. False: no such block."""
        if (block := self.blocks.get(source)) is None or len(block) != len(target):
            return False
        target[:] = block
        return True
