"""Decodes token ids to text as they arrive. Text that was given out is final, and all of it is the full decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.model_files import Tokenizer
from router.text.joiner import ByteJoiner, ContextJoiner, RunJoiner
from router.text.token_table import Joining, TokenTable, token_table


class Joiner(Protocol):
    """Turns tokens, one after the other, into final text."""

    @property
    def held_chars(self) -> int:
        """The number of complete characters that are not given out yet."""
        ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The text of one sequence, each character once it is complete; the time per token is constant.

    All pieces from `push` and `flush` together equal `tokenizer.decode` of all ids. Control tokens are left out unless
    `skip_special_tokens` is False or they are among `kept`. Ids without a token add nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> None:
        table = token_table(tokenizer)
        self._table = table
        self._skipped = tokenizer.special_ids - kept if skip_special_tokens else frozenset[int]()
        self._joiner = _joiner(tokenizer, table)
        self._given = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make final."""
        if len(token_ids) == 1:
            token_id = token_ids[0]
            shown = token_id not in self._skipped and self._table.raw(token_id)
            return self._count(self._joiner.push(token_id) if shown else "")
        pieces = [
            self._joiner.push(token_id)
            for token_id in token_ids
            if token_id not in self._skipped and self._table.raw(token_id)
        ]
        return self._count("".join(pieces))

    def flush(self) -> str:
        """The held text at the end of the sequence; an incomplete character becomes U+FFFD."""
        return self._count(self._joiner.flush())

    @property
    def position(self) -> int:
        """The character at which the next token's text begins; inside a character, where that character begins."""
        return self._given + self._joiner.held_chars

    def _count(self, text: str) -> str:
        self._given += len(text)
        return text


def _joiner(tokenizer: Tokenizer, table: TokenTable) -> Joiner:
    if table.joining is Joining.BYTES:
        return ByteJoiner(table)
    if table.joining is Joining.RUNS:
        return RunJoiner(table)
    return ContextJoiner(tokenizer)
