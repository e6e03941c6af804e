"""Pure description of the KV that ranks exchange: which units of a prompt, and which heads go from which rank to which.

A unit is a block of one KV cache group. Its bytes are head-major, `[heads, layers, tokens, content]`, in the cache of
any rank, on the wire and in staging memory, so the heads of a transfer are one contiguous range of a unit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from common.errors import WireError

MAX_RANKS = 1024
"""Maximum number of tensor parallel ranks in a transfer's name."""
MAX_BASE = 200
"""Longest request id, in bytes, that a transfer's name repeats. Longer ids are hashed."""
_NAME = re.compile(r"(?P<base>.+)/(?P<prefill>\d{1,4})\.(?P<size>\d{1,4})\.(?P<decode>\d{1,4})\Z", re.DOTALL)

GroupKind = Literal["full", "window", "state"]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A KV cache group of the whole model: layers with common block tables.

    `window`: maximum context in tokens, for kind "window". `num_heads` are the model's KV heads. Recurrent state, of
    kind "state", is not split by heads, so both workers must have equally many ranks. `head_bytes`: size of one head of
    a block, in all layers of the group.
    """

    kind: GroupKind
    block_size: int
    num_heads: int
    head_bytes: int
    window: int = 0


Unit = tuple[int, int]
"""Group, and index of the block in the request's block table of that group. -1 is the last block."""


def units_of(groups: tuple[KVGroup, ...], num_tokens: int) -> tuple[Unit, ...]:
    """Return the units of the KV of `num_tokens` tokens, in the order in which they are sent.

    Blocks of full attention groups come first, by position in the prompt, because they can be sent while the rest of
    the prompt is computed. Windows and states follow, which are final only at the end.
    """
    full = [
        (index * group.block_size, number, index)
        for number, group in enumerate(groups)
        if group.kind == "full"
        for index in range(_num_blocks(group, num_tokens))
    ]
    windows = [
        (number, index)
        for number, group in enumerate(groups)
        if group.kind == "window"
        for index in range(first_in_window(group, num_tokens), _num_blocks(group, num_tokens))
    ]
    states = [(number, -1) for number, group in enumerate(groups) if group.kind == "state"]
    return (*((number, index) for _, number, index in sorted(full)), *windows, *states)


def num_units(groups: tuple[KVGroup, ...], num_tokens: int) -> int:
    """Return the number of `units_of` these tokens."""
    return sum(
        1
        if group.kind == "state"
        else _num_blocks(group, num_tokens) - (first_in_window(group, num_tokens) if group.kind == "window" else 0)
        for group in groups
    )


def num_ready(
    groups: tuple[KVGroup, ...], units: Sequence[Unit], num_tokens: int, num_computed: int, start: int
) -> int:
    """Return how many of the units of `num_tokens` tokens are final once `num_computed` of them are computed.

    The first `start` units are known to be final.
    """
    if num_computed >= num_tokens:
        return len(units)
    while start < len(units):
        number, index = units[start]
        if groups[number].kind != "full" or (index + 1) * groups[number].block_size > num_computed:
            break
        start += 1
    return start


def first_in_window(group: KVGroup, num_tokens: int) -> int:
    """Return the first block that the token after `num_tokens` tokens attends to."""
    return max(0, num_tokens - group.window + 1) // group.block_size


def can_skip_blocks(groups: tuple[KVGroup, ...]) -> bool:
    """Whether leading blocks that the receiver has cached can be left out of a transfer."""
    return len(groups) == 1 and groups[0].kind == "full"


def heads_of(num_heads: int, size: int, rank: int) -> range:
    """Return the heads that a rank of `size` holds. With fewer heads than ranks, neighbours hold the same head."""
    if num_heads >= size:
        each = num_heads // size
        return range(rank * each, (rank + 1) * each)
    head = rank * num_heads // size
    return range(head, head + 1)


@dataclass(frozen=True, slots=True)
class Pair:
    """Transfer of these heads, numbered in the whole model, from a prefill rank to a decode rank."""

    prefill: int
    decode: int
    heads: range


def pairs(num_heads: int, num_prefill: int, num_decode: int) -> tuple[Pair, ...]:
    """Return the transfers by which each decode rank gets each of its heads once.

    Of several prefill ranks that hold a head, the decode ranks that need it use each equally often. Raises WireError if
    the heads cannot be divided among that many ranks.
    """
    owners = _holders(num_heads, num_prefill)
    needed = _holders(num_heads, num_decode)
    heads: dict[tuple[int, int], list[int]] = {}
    for head in range(num_heads):
        for place, decode in enumerate(needed[head]):
            prefill = owners[head][place * len(owners[head]) // len(needed[head])]
            heads.setdefault((prefill, decode), []).append(head)
    return tuple(Pair(*key, range(each[0], each[-1] + 1)) for key, each in sorted(heads.items()))


def _holders(num_heads: int, size: int) -> list[list[int]]:
    if num_heads % size and size % num_heads:
        raise WireError(f"{num_heads} KV heads cannot be divided among {size} ranks")
    holders: list[list[int]] = [[] for _ in range(num_heads)]
    for rank in range(size):
        for head in heads_of(num_heads, size, rank):
            holders[head].append(rank)
    return holders


def _num_blocks(group: KVGroup, num_tokens: int) -> int:
    return -(-num_tokens // group.block_size)


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads of a group in a rank's unit: local heads, and their bytes in the unit."""

    group: int
    heads: range
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class KVLayout:
    """KV of a model on one of `size` tensor parallel ranks, in one of `num_stages` pipeline stages."""

    groups: tuple[KVGroup, ...]
    dtype: str
    size: int = 1
    rank: int = 0
    num_stages: int = 1
    stage: int = 0

    def heads(self, group: int) -> range:
        """Return the heads of the whole model that this rank holds."""
        return heads_of(self.groups[group].num_heads, self.size, self.rank)

    def unit_bytes(self, group: int) -> int:
        """Return the size of a unit of this rank."""
        return len(self.heads(group)) * self.groups[group].head_bytes

    def describe(self) -> str:
        """Describe the KV independent of the number of ranks. Ranks exchange KV if it is equal."""
        parts = [f"dtype={self.dtype}", f"stages={self.num_stages}"]
        for group in self.groups:
            more = f" window={group.window}" if group.kind == "window" else ""
            more += f" ranks={self.size}" if group.kind == "state" else ""
            parts.append(
                f"{group.kind}(block_size={group.block_size} heads={group.num_heads} "
                f"head_bytes={group.head_bytes}{more})"
            )
        return " ".join(parts)

    def fingerprint(self, weights: str) -> str:
        """Return what must be equal on both sides of a transfer: the model's weights and this layout."""
        content = f"{weights}\n{self.describe()}\nstage={self.stage}"
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def sends_to(self, num_decode: int) -> tuple[int, ...]:
        """Return the decode ranks of a worker with `num_decode` ranks that this rank sends heads to.

        Raises WireError if workers with these numbers of ranks cannot exchange KV.
        """
        return tuple(
            sorted(decode for prefill, decode in self._partners(self.size, num_decode) if prefill == self.rank)
        )

    def receives_from(self, num_prefill: int) -> tuple[int, ...]:
        """Return the prefill ranks of a worker with `num_prefill` ranks that send heads to this rank.

        Raises WireError if workers with these numbers of ranks cannot exchange KV.
        """
        return tuple(
            sorted(prefill for prefill, decode in self._partners(num_prefill, self.size) if decode == self.rank)
        )

    def _partners(self, num_prefill: int, num_decode: int) -> frozenset[tuple[int, int]]:
        """Return the pairs of ranks that share heads. A transfer has units of all groups, so they must be the same."""
        found = {
            frozenset((pair.prefill, pair.decode) for pair in pairs(group.num_heads, num_prefill, num_decode))
            for group in self.groups
        }
        if len(found) > 1:
            raise WireError(
                f"{num_prefill} prefill ranks and {num_decode} decode ranks share heads of some groups only"
            )
        return found.pop()

    def outgoing(self, group: int, decode: int, num_decode: int) -> HeadRange:
        """Return the heads of this rank that a decode rank gets. Raises WireError if it gets none of them."""
        return self._range(group, pairs(self.groups[group].num_heads, self.size, num_decode), self.rank, decode)

    def incoming(self, group: int, prefill: int, num_prefill: int) -> HeadRange:
        """Return the heads of this rank that a prefill rank sends. Raises WireError if it sends none of them."""
        return self._range(group, pairs(self.groups[group].num_heads, num_prefill, self.size), prefill, self.rank)

    def _range(self, group: int, all_pairs: tuple[Pair, ...], prefill: int, decode: int) -> HeadRange:
        for pair in all_pairs:
            if (pair.prefill, pair.decode) == (prefill, decode):
                first, each = self.heads(group).start, self.groups[group].head_bytes
                heads = range(pair.heads.start - first, pair.heads.stop - first)
                return HeadRange(group, heads, heads.start * each, heads.stop * each)
        raise WireError(f"prefill rank {prefill} and decode rank {decode} share no heads of group {group}")


def base_of(request_id: str) -> str:
    """Return the part of a transfer's name that stands for the request: its id, or a hash of a long one."""
    if len(request_id.encode()) <= MAX_BASE:
        return request_id
    return "#" + blake2b(request_id.encode(), digest_size=20).hexdigest()


def transfer_name(request_id: str, prefill: int, size: int, decode: int) -> str:
    """Return the request id in messages of a transfer from rank `prefill` of `size` to rank `decode`."""
    return f"{base_of(request_id)}/{prefill}.{size}.{decode}"


@dataclass(frozen=True, slots=True)
class TransferName:
    """Parts of a transfer's name. `base` stands for the request."""

    base: str
    prefill: int
    size: int
    decode: int

    @classmethod
    def parse(cls, name: str) -> TransferName:
        """Raises WireError."""
        match = _NAME.match(name)
        if match is None or not int(match["prefill"]) < int(match["size"]) <= MAX_RANKS:
            raise WireError(f"{name[:64]!r} is not the name of a transfer between vLLM ranks")
        return cls(match["base"], int(match["prefill"]), int(match["size"]), int(match["decode"]))
