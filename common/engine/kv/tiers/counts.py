"""Metrics of a tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierCounts:
    """`num_blocks` of `num_slots` slots are in use. The other counts are totals since the worker started.

    `num_lost`: blocks that were evicted from memory before any tier stored them.
    """

    name: str
    num_blocks: int
    num_slots: int
    is_on: bool
    num_written: int
    num_corrupt: int
    num_lost: int
