"""Errors of the stores."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from common.errors import RETRY_AFTER_S, DiptychError, Unavailable

T = TypeVar("T")


class StoreFailed(DiptychError):
    """A database operation failed: the disk is full, slow or damaged, or it is closed. `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RecordTooLarge(StoreFailed):
    """A record exceeds the maximum size of one, whatever else the store contains."""

    def __init__(self, message: str) -> None:
        super().__init__("too_large", message)


class ConversationGone(DiptychError):
    """A conversation is incomplete: response `missing` is no longer stored."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"response {missing!r} is no longer stored")
        self.missing = missing


class ConversationTooLong(DiptychError):
    """A stored conversation exceeds the reader's limit."""


class StoreFull(DiptychError):
    """The store has no capacity for more files. The message contains the numbers."""


class FileInUse(DiptychError):
    """A file cannot be deleted because an unfinished batch reads it."""

    def __init__(self, file: str, batch: str) -> None:
        super().__init__(f"file {file!r} is the input of the unfinished batch {batch!r}: cancel the batch first")


async def asked(question: Awaitable[T]) -> T:
    """Await a store operation. Raises Unavailable if it fails."""
    try:
        return await question
    except StoreFailed as failed:
        raise Unavailable(str(failed), retry_after_s=RETRY_AFTER_S) from failed
