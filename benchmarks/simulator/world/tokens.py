"""Tokens of which only the number is known, and the hashes of their blocks, which a load injects.

Production code counts, cuts and appends tokens, and compares blocks by their hashes: it needs no more of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import SupportsIndex, overload

from common.blocks.block_hash import BlockHasher
from router.dispatch.prompt import Prompt, PromptHashCache

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
        self.length += len(token_ids) if isinstance(token_ids, tuple) else sum(1 for _ in token_ids)


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
    _of_prompt: dict[int, list[bytes]] = field(default_factory=dict, repr=False, compare=False)

    def of_prompt(self, block_size: int) -> list[bytes]:
        """The hashes of the prompt's full blocks, which a router and two workers ask for."""
        known = self._of_prompt.get(block_size)
        if known is None:
            num_blocks = self.num_prompt_tokens // block_size
            known = self._of_prompt[block_size] = [self.digest(index, block_size) for index in range(num_blocks)]
        return known

    def forget(self) -> None:
        """Keep no hashes: the request is over."""
        self._of_prompt.clear()

    def digest(self, index: int, block_size: int) -> bytes:
        """The hash of the block `index` of prompt and answer, in blocks of `block_size` tokens."""
        last = (index + 1) * block_size - 1
        place = last // self.id_tokens
        if place < len(self.ids) and last < self.num_prompt_tokens:
            return _digest(self.copy << 40 | self.ids[place], index)
        return _digest(_OWN | self.number, index)


def _digest(content: int, index: int) -> bytes:
    """Its first eight bytes, which routers hear of, differ as the whole does: odd factors mix both numbers."""
    mixed = (content * 0x9E3779B97F4A7C15 + index * 0xC2B2AE3D27D4EB4F) & 0xFFFF_FFFF_FFFF_FFFF
    return _DIGEST.pack(mixed, index)


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
        content, size = self._content, self.block_size
        num_blocks = len(token_ids) // size
        if len(self.hashes) < num_blocks:
            self.hashes += content.of_prompt(size)[len(self.hashes) : num_blocks]
            self.hashes += [content.digest(index, size) for index in range(len(self.hashes), num_blocks)]
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

    def hasher(self, block_size: int, known: PromptHashCache) -> InjectedHasher:
        mine = self._hashers.get(block_size)
        if mine is None:
            mine = self._hashers[block_size] = InjectedHasher(self._content, block_size)
            mine.extend(self._token_ids)
        return InjectedHasher.copy(mine)  # type: ignore[arg-type]

    def extend(self, hasher: BlockHasher, output: Sequence[int]) -> list[bytes]:
        return hasher.extend(CountedTokens(self._content.num_prompt_tokens + len(output)))
