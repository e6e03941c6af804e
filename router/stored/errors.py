"""Why a store could not do what it was asked."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from common.errors import RETRY_AFTER_S, DiptychError, Unavailable

T = TypeVar("T")


class StoreFailed(DiptychError):
    """The database could not do it: full, slow, damaged or closed. `reason` is a metric's label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConversationGone(DiptychError):
    """A conversation has no beginning: response `missing` is no longer stored."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"response {missing!r} is no longer stored")
        self.missing = missing


class ConversationTooLong(DiptychError):
    """A stored conversation is larger than what its reader takes."""


class StoreFull(DiptychError):
    """There is no room for more files. The message has the numbers."""


class FileInUse(DiptychError):
    """A file cannot be deleted: `batch`, which has not ended, reads it."""

    def __init__(self, file: str, batch: str) -> None:
        super().__init__(f"file {file!r} is the input of batch {batch!r}, which has not ended: cancel that first")


async def asked(question: Awaitable[T]) -> T:
    """A store's answer. Raises Unavailable when it has none."""
    try:
        return await question
    except StoreFailed as failed:
        raise Unavailable(str(failed), retry_after_s=RETRY_AFTER_S) from failed
