"""What a receiver asks of its device, whatever memory that copies out of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol


class Reached(Protocol):
    """Memory of another worker that this worker's device copies out of itself."""

    block_bytes: int

    def copy(self, copies: Iterable[tuple[int, int]]) -> Iterator[int | None]:
        """Copy places into blocks, (place, index) pairs, at the latest when the result of one is asked for: the
        checksum of what was copied, None where there is no such place."""

    def close(self) -> None:
        """End the device's access, before the memory is unmapped."""
