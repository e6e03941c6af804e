"""Where a streamed answer is written while its client reads: straight to the connection, without a task a piece."""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope


class Pieces(Protocol):
    """The connection of one answer whose head is sent."""

    @property
    def ready(self) -> bool:
        """Whether a piece can be written now: the client reads, and is still there."""
        ...

    def write(self, piece: bytes) -> None:
        """Write a piece of the body, which has at least one byte, behind all that was sent before."""
        ...


def pieces_of(scope: Scope) -> Pieces | None:
    """The `Pieces` of a request's connection; None for a server without them, where the slower `send` writes."""
    found: Pieces | None = scope.get("state", {}).get("pieces")
    return found
