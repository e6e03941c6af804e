"""The checksum of a block: of its bytes in a frame, or in memory that another process may write to."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def checksum(block: memoryview) -> int:
    """xxh3-64 of one block's bytes."""
    return xxhash.xxh3_64_intdigest(block)


def checksum_of_parts(parts: Iterable[memoryview]) -> int:
    """`checksum` of the parts one behind the other. Each is read before the next one is asked for."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
