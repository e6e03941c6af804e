"""What the stores of responses, files and batches do besides answering: how often, and how much at a time."""

from __future__ import annotations

from common.machine import LEASES_S, WallClock

LEASE_S = 15.0
"""How long an answer in the background, or a batch, stays its router's own without a renewal: the wait of a client
before another router takes over."""
CHORE_S = 3.0
"""Between two looks at leases, cancellations and ages: a lease survives four that fail."""
MAX_DELETED = 1000
"""Rows that one look deletes for lack of room, or for their age: requests wait for the transaction."""
PURGED_ROWS, PURGED_BYTES = 2000, 32 * 1024 * 1024
"""What one transaction deletes of deleted files: other work waits for it."""
VACUUM_PAGES = 1000
"""Pages of 4 KiB that a look gives back to the file system at most: milliseconds."""
ABANDONED_S = 7200.0
"""An upload that is not complete by then belongs to a router that ended, and is deleted: twice what one may take."""


def lease_bounds(clock: WallClock) -> tuple[float, float]:
    """Return the earliest and latest end of a valid lease. Later ends come from a clock that was ahead."""
    return clock.earliest(LEASES_S), clock.latest(LEASES_S) + LEASE_S
