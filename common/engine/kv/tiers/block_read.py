"""Read of one prompt's blocks from tiers or from a peer into the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockRead:
    """Read of the chain `hashes` into `blocks`, in order, until `deadline` (monotonic seconds).

    The request `request_id` owns the blocks. The reader thread writes to them only within `commit`, so once `cancel`
    has returned, they may be computed or reused. The first `num_done` blocks are complete; `by_tier` counts them by
    source. The reader thread sets `ended` when it has read all blocks or reached one that no tier has. `is_pull`: the
    blocks come from a peer. `is_late`: the reader thread gave up at the deadline.
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
        """Copy the next block into the cache with `copy`. Returns False, without copying, after `cancel`."""
        with self._lock:
            if self.cancelled:
                return False
            copy()
            self.num_done += 1
            self.by_tier[tier] = self.by_tier.get(tier, 0) + 1
            return True

    def cancel(self) -> None:
        """Stop writing to the blocks. Waits at most for one copy, never for a disk."""
        with self._lock:
            self.cancelled = True
