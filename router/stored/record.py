"""A stored response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

QUEUED: Final = "queued"
IN_PROGRESS: Final = "in_progress"
RUNNING: Final = frozenset((QUEUED, IN_PROGRESS))
ROW_BYTES = 512
"""What an entry takes beside its JSON: names, times, indexes."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response of the key `owner`, as JSON: its own `input` items, its `output` items, and the rest as `head`.

    `previous` is the response that its conversation goes on from.
    """

    id: str
    owner: str
    status: str
    input: bytes
    head: bytes
    output: bytes = b"[]"
    previous: str | None = None
    background: bool = False

    @property
    def num_bytes(self) -> int:
        return ROW_BYTES + len(self.input) + len(self.head) + len(self.output)


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """The `input` and `output` items of one response of a conversation, as JSON lists."""

    id: str
    status: str
    input: bytes
    output: bytes


@dataclass(frozen=True, slots=True)
class StoreSize:
    num_entries: int = 0
    num_bytes: int = 0
