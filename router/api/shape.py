"""What differs between the answers of the two generation endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diptych.router.api.choice import Choice, Piece

Object = dict[str, object]


class Shape(Protocol):
    """Writes choices as JSON objects. `prompt_token_ids` are given where the client wants them, else None."""

    object: str
    chunk_object: str

    def opening(self, choice: Choice, prompt_token_ids: list[int] | None) -> Object | None:
        """What a stream says of a choice before its first text, if anything."""
        ...

    def chunk(self, choice: Choice, piece: Piece) -> Object:
        """A part of a choice, in a stream."""
        ...

    def whole(self, choice: Choice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        """A complete choice."""
        ...

    def envelope(self, first: Choice, prompt_token_ids: list[int] | None) -> Object:
        """Members of the answer, or of a stream's first chunk, beside its choices."""
        ...
