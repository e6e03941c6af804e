"""What differs between the answers of the two generation endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.generation.choice import Choice, Piece

Object = dict[str, object]


class Shape(Protocol):
    """Writes choices as JSON objects. `prompt_token_ids` are given where the client wants them, else None."""

    object: str
    chunk_object: str

    def opening(self, choice: Choice, prompt_token_ids: list[int] | None) -> Object | None:
        """What a stream says of a choice before its first text, if anything."""
        ...

    def chunks(self, choice: Choice, piece: Piece, *, at_least_one: bool) -> list[Object]:
        """What a piece adds to a choice, in a stream: parts of it, none where there is nothing to say of it.

        With `at_least_one` even such a piece has an empty part: something is said beside it.
        """
        ...

    def whole(self, choice: Choice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        """A complete choice."""
        ...

    def envelope(self, first: Choice, prompt_token_ids: list[int] | None) -> Object:
        """Members of the answer, or of a stream's first chunk, beside its choices."""
        ...
