"""Blocks of one prompt on their way from tiers, or from a peer, into the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockRead:
    """The chain `hashes` is to be read into `blocks`, in order, until `deadline`.

    The blocks belong to the request `request_id`. The reading thread writes to them only within `commit`, so none after
    `cancel` returned: they may then be computed, or given to others. The first `num_done` of them are whole; `by_tier`
    says where from. The thread sets `ended` when it is done with all, or stopped at one that no tier holds. `is_pull`:
    the blocks come from a peer; `is_late`: its thread gave up at the deadline.
    """

    request_id: str
    attempt: int
    hashes: Sequence[bytes]
    blocks: Sequence[int]
    deadline: float
    num_done: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    cancelled: bool = False
    is_pull: bool = False
    is_late: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, tier: str, copy: Callable[[], None]) -> bool:
        """Copy the next block into the cache with `copy`; False, without a copy, after `cancel`."""
        with self._lock:
            if self.cancelled:
                return False
            copy()
            self.num_done += 1
            self.by_tier[tier] = self.by_tier.get(tier, 0) + 1
            return True

    def cancel(self) -> None:
        """Take the blocks back. Waits for a copy at most, never for a disk."""
        with self._lock:
            self.cancelled = True
