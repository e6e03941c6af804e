"""What metrics tell of a tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierCounts:
    """`num_blocks` of at most `num_slots` are here. Since the start so many were written, were found damaged, and left
    memory before they were written to any tier.
    """

    name: str
    num_blocks: int
    num_slots: int
    is_on: bool
    num_written: int
    num_corrupt: int
    num_lost: int
