"""Checksum of a block, in a frame or in memory that another process may write to."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def checksum(block: memoryview) -> int:
    """Return the xxh3-64 of the block's bytes."""
    return xxhash.xxh3_64_intdigest(block)


def checksum_of_parts(parts: Iterable[memoryview]) -> int:
    """Return the `checksum` of the concatenated parts. Each part is read before the next is requested."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
