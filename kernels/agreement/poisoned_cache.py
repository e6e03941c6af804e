"""KV cache blocks for checks, filled with NaN except for the slots that a check writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.interface import KVLayout, QuerySpan, head_dim_of, packed, unpacked

FREED = 0
"""Block used as padding in block tables. Never allocated to a sequence."""


class PoisonedCache:
    """Up to `num_blocks` blocks of `kv`, spread evenly from the first to the last to cover large addresses."""

    def __init__(self, kv: Tensor, num_blocks: int, random: torch.Generator, latent_dim: int = 0) -> None:
        self.kv, self.random = kv, random
        total, _, kv_heads, size, self.parts, _ = kv.shape  # parts: keys and values, or latents
        count = min(total, num_blocks)
        self.blocks = [index * (total - 1) // max(1, count - 1) for index in range(count)]
        own = torch.tensor(self.blocks[1:])
        self._free: list[int] = own[torch.randperm(len(own), generator=random)].tolist()
        self.layout = KVLayout(total, kv.shape[1], kv_heads, size, head_dim_of(kv), latent_dim)
        self._nothing = packed(self.numbers(1, kv.shape[1]).fill_(float("nan")), kv.dtype)
        self.poison()

    @property
    def num_tokens(self) -> int:
        """Capacity in tokens."""
        return len(self.blocks[1:]) * self.layout.block_size

    def numbers(self, blocks: int, layers: int) -> Tensor:
        """Return random keys and values, float32 [blocks, layers, kv_heads, block_size, parts, head_dim]."""
        layout = self.layout
        sizes = (blocks, layers, layout.num_kv_heads, layout.block_size, self.parts, layout.head_dim)
        made = torch.randn(*sizes, generator=self.random)
        return made.to(self.kv.device)

    def poison(self) -> None:
        """Fill all slots with NaN."""
        self._each(self._nothing)

    def clear(self) -> None:
        """Fill all slots with zeros, as in a new cache."""
        self._each(torch.zeros_like(self._nothing))

    def take(self, num_tokens: int) -> list[int]:
        """Allocate blocks for a sequence; fewer than needed if not enough are free."""
        count = min(-(-num_tokens // self.layout.block_size), len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self) -> None:
        """Free all blocks without changing their contents."""
        self._free = self.blocks[1:]

    def write(self, layer: int, table: Sequence[int], first: int, values: Tensor) -> None:
        """Write values, float32 [n, kv_heads, parts, head_dim], from slot `first` of a sequence, and NaN to its other
        slots."""
        size, each = self.layout.block_size, (self.layout.num_kv_heads, self.parts, self.layout.head_dim)
        dense = torch.full((len(table) * size, *each), float("nan"), device=self.kv.device)
        dense[first : first + len(values)] = values
        blocks = dense.view(len(table), size, *each).transpose(1, 2).contiguous()
        raw, made = self.kv.view(torch.uint8), packed(blocks, self.kv.dtype).view(torch.uint8)
        for index, block in enumerate(table):
            raw[block, layer] = made[index]

    def read(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """Read blocks of one layer, float32 [blocks, 1, kv_heads, block_size, parts, head_dim]."""
        raw = self.kv.view(torch.uint8)
        found = torch.stack([raw[block, layer] for block in blocks]).view(self.kv.dtype)
        return unpacked(found).float()[:, None]

    def plain(self, layer: int, spans: Sequence[QuerySpan]) -> tuple[Tensor, KVLayout, list[QuerySpan]]:
        """Copy one layer of the blocks of `spans` to a small float32 cache. Also returns its layout and spans."""
        used = sorted({block for span in spans for block in self._seen(span)})
        place = {block: index for index, block in enumerate(used)}
        moved = [span._replace(block_table=[place[block] for block in self._seen(span)]) for span in spans]
        kv = self.read(layer, used).contiguous()
        return kv, KVLayout(len(used), 1, *self.layout[2:]), moved

    def _seen(self, span: QuerySpan) -> Sequence[int]:
        return span.block_table[: -(-span.length // self.layout.block_size)]

    def _each(self, block: Tensor) -> None:
        raw, made = self.kv.view(torch.uint8), block.view(torch.uint8)
        for index in self.blocks:
            raw[index] = made[0]
