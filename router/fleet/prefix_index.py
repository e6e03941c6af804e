"""What each worker probably has in its prefix cache, by the block hashes of the prompts that this router sent it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

CAPACITY = 65_536
"""Block hashes that are kept for one worker."""


class PrefixIndex:
    """A bounded LRU of chained block hashes for every worker.

    A chain is inserted tail first, so its head is always the younger and a worker's entries stay closed under
    "the block before". That makes the length of a hit a binary search.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def insert(self, address: str, hashes: Sequence[bytes], *, capacity: int | None = None) -> None:
        """The worker has, or soon has, the KV of this chain. `capacity` is the worker's own number of blocks."""
        bound = self._capacity if capacity is None else min(capacity, self._capacity)
        known = self._blocks.setdefault(address, OrderedDict())
        for digest in reversed(hashes[:bound]):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > bound:
            known.popitem(last=False)

    def num_hits(self, address: str, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of the chain the worker has."""
        known = self._blocks.get(address)
        if not known:
            return 0
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def size(self, address: str) -> int:
        return len(self._blocks.get(address, ()))

    def clear(self, address: str) -> None:
        """The worker restarted: it holds nothing."""
        self._blocks.pop(address, None)

    def clear_all(self) -> None:
        self._blocks.clear()
