"""Tokens of which only the number is known, and the hashes of their blocks, which a load injects.

Production code counts, cuts and appends tokens, and compares blocks by their hashes: it needs no more of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import SupportsIndex, overload

from common.kv.block_hash import BlockHasher
from router.dispatch.prompt import Prompt

_DIGEST = struct.Struct("<QQ")
_OWN = 1 << 63
"""Marks hashes of blocks that no other request has."""


class CountedTokens(list[int]):
    """A list of `length` tokens that holds none of them: each is token 0."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return repeat(0, self.length)

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> CountedTokens: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | CountedTokens:
        if isinstance(index, slice):
            return CountedTokens(len(range(*index.indices(self.length))))
        if not -self.length <= index.__index__() < self.length:
            raise IndexError(f"token {index.__index__()} of {self.length}")
        return 0

    def __add__(self, more: Sequence[int]) -> CountedTokens:  # type: ignore[override]
        return CountedTokens(self.length + len(more))

    def append(self, token_id: int) -> None:
        self.length += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        self.length += sum(1 for _ in token_ids)


@dataclass(frozen=True, slots=True)
class Content:
    """What a request's prompt has in common with others.

    The first `num_prompt_tokens` tokens are the prompt, whose blocks of `id_tokens` tokens have `ids`. Requests of one
    `copy` whose leading ids are equal share that prefix. All other tokens are the request's own, known by `number`.
    """

    number: int
    num_prompt_tokens: int
    copy: int = 0
    ids: tuple[int, ...] = ()
    id_tokens: int = 512

    def digest(self, index: int, block_size: int) -> bytes:
        """The hash of the block `index` of prompt and answer, in blocks of `block_size` tokens."""
        last = (index + 1) * block_size - 1
        place = last // self.id_tokens
        if place < len(self.ids) and last < self.num_prompt_tokens:
            return _DIGEST.pack(self.copy << 40 | self.ids[place], index)
        return _DIGEST.pack(_OWN | self.number, index)


class InjectedHasher(BlockHasher):
    """Hashes by content instead of by tokens."""

    def __init__(self, content: Content, block_size: int) -> None:
        self.block_size, self._content = block_size, content
        self.hashes: list[bytes] = []

    def copy(self) -> InjectedHasher:
        other = InjectedHasher(self._content, self.block_size)
        other.hashes = list(self.hashes)
        return other

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        known, num_blocks = len(self.hashes), len(token_ids) // self.block_size
        if known < num_blocks:
            content, size = self._content, self.block_size
            self.hashes += [content.digest(index, size) for index in range(known, num_blocks)]
        return self.hashes


class CountedPrompt(Prompt):
    """A prompt for the router: its length, and the hashes of its blocks."""

    def __init__(self, content: Content) -> None:
        super().__init__(CountedTokens(content.num_prompt_tokens))
        self._content = content

    @property
    def packed(self) -> bytes:
        """Nothing: simulated workers know the request by its id."""
        return b""

    def hasher(self, block_size: int) -> InjectedHasher:
        known = self._hashers.get(block_size)
        if known is None:
            known = self._hashers[block_size] = InjectedHasher(self._content, block_size)
            known.extend(self._token_ids)
        return InjectedHasher.copy(known)  # type: ignore[arg-type]
