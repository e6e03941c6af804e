"""Blocks of a KV cache that no sequence owns yet, full of NaN but for the slots that a check writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.interface import KVLayout, QuerySpan, head_dim_of, packed, unpacked

FREED = 0
"""The block that padding of block tables names: no check's sequence owns it."""


class PoisonedCache:
    """Up to `num_blocks` blocks of `kv`, from its first to its last, so that wide addresses are among them."""

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
        """Tokens that sequences of a check may have together, if each but one fills its last block."""
        return len(self.blocks[1:]) * self.layout.block_size

    def numbers(self, blocks: int, layers: int) -> Tensor:
        """Random keys and values float32 [blocks, layers, kv_heads, block_size, parts, head_dim], on its device."""
        layout = self.layout
        sizes = (blocks, layers, layout.num_kv_heads, layout.block_size, self.parts, layout.head_dim)
        made = torch.randn(*sizes, generator=self.random)
        return made.to(self.kv.device)

    def poison(self) -> None:
        """NaN into every slot of these blocks."""
        self._each(self._nothing)

    def clear(self) -> None:
        """Zeros, as a new cache has them."""
        self._each(torch.zeros_like(self._nothing))

    def take(self, num_tokens: int) -> list[int]:
        """Blocks for a sequence: fewer where there are not as many."""
        count = min(-(-num_tokens // self.layout.block_size), len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self) -> None:
        """All blocks are free again; their slots keep what they hold."""
        self._free = self.blocks[1:]

    def write(self, layer: int, table: Sequence[int], first: int, values: Tensor) -> None:
        """values float32 [n, kv_heads, parts, head_dim] into slots `first` .. of a sequence; NaN in all its others."""
        size, each = self.layout.block_size, (self.layout.num_kv_heads, self.parts, self.layout.head_dim)
        dense = torch.full((len(table) * size, *each), float("nan"), device=self.kv.device)
        dense[first : first + len(values)] = values
        blocks = dense.view(len(table), size, *each).transpose(1, 2).contiguous()
        raw, made = self.kv.view(torch.uint8), packed(blocks, self.kv.dtype).view(torch.uint8)
        for index, block in enumerate(table):
            raw[block, layer] = made[index]

    def read(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """What blocks of one layer stand for, float32 [blocks, 1, kv_heads, block_size, parts, head_dim]."""
        raw = self.kv.view(torch.uint8)
        found = torch.stack([raw[block, layer] for block in blocks]).view(self.kv.dtype)
        return unpacked(found).float()[:, None]

    def plain(self, layer: int, spans: Sequence[QuerySpan]) -> tuple[Tensor, KVLayout, list[QuerySpan]]:
        """One layer of the blocks of `spans` as a small cache of float32, and the spans over that."""
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
