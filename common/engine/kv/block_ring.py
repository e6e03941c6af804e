"""Places in shared memory that blocks pass through on their way to workers of the same host.

A cache that others cannot map (a GPU's, or one in the memories of several ranks) has such a ring. Its owner copies a
block into a place, the receiver copies it out of there and says so.

    free ──put: filled and lent to a transfer──> lent ──KVTaken, or the transfer's end──> free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.engine.kv.copy_stream import NotRegistered
from common.engine.kv.shared_memory import KVMemory, NotShared, SharedMemory
from common.engine.kv.staging import StagedOutgoing
from common.errors import BlockError

RING_BYTES = 128 * 2**20
"""Memory for places: several messages to several receivers."""
LEAST_PLACES = 8
"""The fewest places, however large a block is: copies in and out then overlap."""

Key = tuple[str, int]  # request_id and attempt of a transfer


@dataclass(slots=True)
class _Loan:
    """The places that a transfer holds, and the address that it goes to."""

    receiver: str
    places: set[int] = field(default_factory=set)


class BlockRing:
    """The writer's side, used by the sender's thread alone. Every place is free, or lent to one transfer."""

    def __init__(self, blocks: StagedOutgoing, num_places: int) -> None:
        """Raises NotShared where there is no such memory, or the device cannot reach it."""
        self.block_bytes, self.num_places = blocks.block_bytes, num_places
        self._blocks = blocks
        try:
            self._memory = SharedMemory(num_places * self.block_bytes, is_ring=True)
        except OSError as error:
            raise NotShared(f"no room for {num_places} places of {self.block_bytes:,} bytes: {error}") from error
        num_bytes = num_places * self.block_bytes
        with torch.inference_mode(False):  # else a sender's thread without that mode might not write to it
            self._flat = torch.frombuffer(self._memory.pages, dtype=torch.uint8, count=num_bytes)
        try:
            blocks.stream.register(self._flat)
        except NotRegistered as error:
            raise NotShared(str(error)) from error
        self._places = list(self._flat.view(num_places, self.block_bytes))
        self._free = deque(range(num_places))  # freed longest ago first: a late reader has the most time
        self._loans: dict[Key, _Loan] = {}

    @property
    def offer(self) -> KVMemory:
        return self._memory.offer

    @property
    def region(self) -> tuple[int, int]:
        """Address and bytes of the places."""
        return self._flat.data_ptr(), self._flat.nbytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def put(self, key: Key, receiver: str, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Copy the first of `blocks`, as many as places are free, and lend these places to the transfer `key`.

        The places, and the checksum of the bytes in each.
        """
        loan = self._loans.setdefault(key, _Loan(receiver))
        places = [self._free.popleft() for _ in range(min(len(blocks), len(self._free)))]
        loan.places.update(places)
        copies = [(block, self._places[place]) for block, place in zip(blocks, places, strict=False)]
        return places, self._blocks.copy_all(copies) if copies else []

    def give_back(self, key: Key, places: Sequence[int]) -> bool:
        """The transfer holds these places no more. False, and nothing is freed, unless it held all of them."""
        loan = self._loans.get(key)
        if loan is None or not loan.places.issuperset(places):
            return False
        self._free.extend(set(places))
        loan.places.difference_update(places)
        return True

    def end(self, key: Key) -> None:
        """The transfer is over: all its places are free."""
        if (loan := self._loans.pop(key, None)) is not None:
            self._free.extend(loan.places)

    def waits_for(self, receiver: str) -> bool:
        """Whether the transfers to this address hold places, some of which it is going to give back."""
        return any(loan.places for loan in self._loans.values() if loan.receiver == receiver)

    def check_integrity(self) -> None:
        """Raises BlockError unless every place is free, or lent to one transfer."""
        lent = [place for loan in self._loans.values() for place in loan.places]
        if sorted([*self._free, *lent]) != list(range(self.num_places)):
            raise BlockError(f"{len(self._free)} free and {len(lent)} lent places of {self.num_places}")

    def close(self) -> None:
        """Nothing is put any more: unmaps the memory. Receivers keep their maps until they have copied."""
        self._blocks.stream.unregister(self._flat)
        self._places.clear()
        del self._flat, self._memory


def ring_for(blocks: StagedOutgoing, num_blocks: int) -> BlockRing:
    """A ring of the usual size for a cache of `num_blocks`. Raises NotShared."""
    return BlockRing(blocks, min(num_blocks, max(LEAST_PLACES, RING_BYTES // blocks.block_bytes)))
