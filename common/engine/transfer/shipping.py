"""How the blocks of one message leave a sender: as frames, as numbers of blocks, or as numbers of places in a ring.

The receiver copies what is numbered out of mapped memory, or reads it with NIXL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from common.engine.transfer.frames import try_send_blocks
from common.engine.transfer.outgoing import OutgoingTransfer, Way
from common.wire.messages import KVDevice, KVGrant, KVMemory, KVRemote

if TYPE_CHECKING:
    from common.engine.kv import BlockRing, OfferedDevice
    from common.engine.transfer.remote_memory import OfferedMemory


@dataclass(frozen=True, slots=True)
class Parcel:
    """The blocks `indices` of a transfer, ready to be sent.

    `sources` are their numbers in shared memory. Those in places of a ring, or on a GPU, have `checksums` and no
    `views`.
    """

    indices: range
    num_bytes: int
    views: Sequence[memoryview] = ()
    sources: Sequence[int] = ()
    checksums: Sequence[int] = ()

    def try_send(self, socket: zmq.Socket[bytes], transfer: OutgoingTransfer) -> bool:
        """False when the socket's queue is full."""
        return try_send_blocks(
            socket, *transfer.key, self.indices.start, self.views, self.sources, transfer.token, self.checksums
        )


@dataclass(frozen=True, slots=True)
class Shipping:
    """What a worker offers to its receivers, used by the sender's thread. `view` gives a block for a frame, `views` all
    those of a message where it is faster to read them together.

    `memory` is its cache, or it has a `ring`, if others may map one of them. With `remote` they may read either with
    NIXL instead, with `device` a GPU may read the cache. `quantise` gives the blocks of a message as 8-bit numbers.
    `require_shared`: nothing leaves in frames.
    """

    view: Callable[[int], memoryview]
    quantise: Callable[[Sequence[int]], Sequence[memoryview]] | None = None
    memory: KVMemory | None = None
    ring: BlockRing | None = None
    require_shared: bool = False
    views: Callable[[Sequence[int]], Sequence[memoryview]] | None = None
    remote: OfferedMemory | None = None
    device: OfferedDevice | None = None

    @property
    def ring_offer(self) -> KVMemory | None:
        return self.ring.offer if self.ring is not None and self.remote is None else None

    @property
    def remote_offer(self) -> KVRemote | None:
        return self.remote.offer if self.remote is not None else None

    @property
    def device_offer(self) -> KVDevice | None:
        return self.device.offer if self.device is not None else None

    def refusal(self, grant: KVGrant) -> str:
        """What a grant asks for that was not offered, or ""."""
        if grant.shared and not any((self.memory, self.ring, self.remote, self.device)):
            return "shared memory"
        return "8-bit frames" if grant.quantised and (grant.shared or self.quantise is None) else ""

    def way(self, grant: KVGrant) -> Way:
        if grant.shared:
            return Way.REMOTE if self.remote is not None else Way.DEVICE if self.device is not None else Way.SHARED
        return Way.SMALL_FRAMES if grant.quantised else Way.FRAMES

    def in_words(self, grant: KVGrant) -> str:
        """How blocks are going to travel."""
        if grant.shared:
            ring = self.ring
            if self.device is not None:
                return "from GPU to GPU"
            if self.remote is not None:
                return f"through {ring.num_places} places that are read with NIXL" if ring else "by reads with NIXL"
            return f"through {ring.num_places} places in shared memory" if ring else "through shared memory"
        return "over TCP" + ", in 8 bits" * grant.quantised

    def parcel(self, transfer: OutgoingTransfer, indices: range) -> Parcel | None:
        """The first of these blocks, at least one; None while the receiver must give places back first.

        Where others hold every place, a receiver that could wait for them only gets frames.
        """
        blocks = [transfer.blocks[index] for index in indices]
        if transfer.way.is_numbered and (ring := self.ring) is not None:
            receiver = transfer.target.address
            places, checksums = ring.put(transfer.key, receiver, blocks)
            if places:
                num_bytes = len(places) * ring.block_bytes
                return Parcel(indices[: len(places)], num_bytes, (), places, checksums)
            if self.require_shared or ring.waits_for(receiver):
                return None
        if transfer.way is Way.DEVICE and (device := self.device) is not None:
            return Parcel(indices, len(blocks) * device.block_bytes, (), blocks, device.sums(blocks))
        together = self.quantise if transfer.way is Way.SMALL_FRAMES else self.views
        views = together(blocks) if together is not None else [self.view(block) for block in blocks]
        sources = blocks if transfer.way.is_numbered and self.ring is None else ()
        return Parcel(indices, sum(map(len, views)), views, sources)

    def undo(self, transfer: OutgoingTransfer, parcel: Parcel) -> None:
        """The parcel was not sent."""
        if self.ring is not None and parcel.checksums:
            self.ring.give_back(transfer.key, parcel.sources)

    def taken(self, transfer: OutgoingTransfer, places: Sequence[int]) -> bool:
        """The receiver does not read these places any more. False unless they were lent to its transfer.

        Of blocks that came too late it says so without knowing whether they were in places.
        """
        return self.ring is None or self.ring.give_back(transfer.key, places)

    def end(self, transfer: OutgoingTransfer) -> None:
        """The transfer is over, however it ended."""
        if self.ring is not None:
            self.ring.end(transfer.key)

    def close(self) -> None:
        """Nothing is shipped any more."""
        if self.remote is not None:
            self.remote.close()
        if self.ring is not None:
            self.ring.close()
