"""Why a store could not do what it was asked."""

from __future__ import annotations

from common.errors import DiptychError


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
