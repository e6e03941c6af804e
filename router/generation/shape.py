"""The JSON objects in which the answers of OpenAI's two older endpoints differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.generation.choice import AnswerChoice, Piece

Object = dict[str, object]


class Shape(Protocol):
    """Writes choices as JSON objects. `prompt_token_ids` is None unless the client wants them."""

    object: str
    chunk_object: str
    only_text: bool
    """Whether pieces in the middle of a stream differ in nothing but the text of their only chunk."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far; None for an API whose usage does not report them."""
        ...

    def opening(self, choice: AnswerChoice, prompt_token_ids: list[int] | None) -> Object | None:
        """The choice in a stream's first chunk; None for an endpoint without such."""
        ...

    def chunks(self, choice: AnswerChoice, piece: Piece, *, at_least_one: bool) -> list[Object]:
        """The chunks of a piece in a stream; none for a piece that adds nothing.

        With `at_least_one` such a piece has an empty chunk, which carries the usage so far.
        """
        ...

    def whole(self, choice: AnswerChoice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        """A complete choice."""
        ...

    def envelope(self, first: AnswerChoice, prompt_token_ids: list[int] | None) -> Object:
        """Members of the answer, or of a stream's first chunk, beside its choices."""
        ...
