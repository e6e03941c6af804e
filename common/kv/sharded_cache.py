"""The KV cache of a worker whose ranks each hold some of its KV heads, as rank 0 sees it.

    block of the worker   [layer][head 0 | head 1 | head 2 | head 3][slot][K|V][head_dim]
    block of rank 0       [layer][head 0 | head 1] ...       of rank 1 (mapped)   [layer][head 2 | head 3] ...

On the wire and in checksums there are blocks of the worker alone, so another worker may have another number of ranks.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.errors import BlockError, ModelError
from common.kv.cache import KVCache, clear_slots
from common.model_config.shard import Shard, kv_owners

if TYPE_CHECKING:
    from common.model_files.config import ModelConfig


class ShardedCache(KVCache):
    """Rank 0's own cache, which its steps use, and the memory of the others'. Blocks are for `gather` and `scatter`."""

    def __init__(
        self,
        whole: ModelConfig,
        num_ranks: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | str,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(Shard(0, num_ranks).of(whole), num_blocks, block_size, dtype, device)
        self._num_heads, self._size = whole.num_kv_heads, num_ranks
        self._parts: list[Tensor] = [self.tensor]

    def attach(self, part: Tensor) -> None:
        """The cache of the next rank, in memory that this process reaches. Raises ModelError if it is another's."""
        if part.shape != self.tensor.shape or part.dtype != self.dtype:  # all ranks have as many heads
            found, wanted = (f"{list(each.shape)} of {each.dtype}" for each in (part, self.tensor))
            raise ModelError(f"the KV cache of rank {len(self._parts)} is {found}, that of rank 0 {wanted}")
        self._parts.append(part)

    def attach_file(self, descriptor: int) -> None:
        """Maps the memory file of the next rank. Raises ModelError for one that is too small, or OSError."""
        num_bytes = self.tensor.numel() * self.dtype.itemsize
        try:
            pages = mmap.mmap(descriptor, num_bytes)
        except ValueError as error:
            raise ModelError(f"the KV memory of rank {len(self._parts)} is below {num_bytes} bytes") from error
        self.attach(torch.frombuffer(memoryview(pages), dtype=self.dtype).view(self.tensor.shape))

    def block(self, index: int) -> memoryview:
        raise BlockError("a block of several ranks lies in several places: gather it")

    @property
    def wire_heads(self) -> int:
        return self._num_heads

    @property
    def wire_bytes(self) -> int:
        return self.block_bytes // self.config.num_kv_heads * self._num_heads

    def new_block(self) -> Tensor:
        """Memory of one block of all ranks on rank 0's device: [layers, all KV heads, block_size, 2, width]."""
        _, layers, _, *rest = self.tensor.shape
        return torch.empty(layers, self._num_heads, *rest, dtype=self.dtype, device=self.device)

    def clear_slots(self, index: int, first: int) -> None:
        self._check(index)
        for part in self._parts:
            clear_slots(part[index], first)

    def gather(self, index: int, block: Tensor) -> None:
        """Copies a block of all ranks into `block`, uint8 [wire_bytes] anywhere, and waits for that where it is host
        memory.

        BlockError out of range.
        """
        self._check(index)
        whole = self._heads_of(block)
        for rank, owned in enumerate(kv_owners(self._num_heads, self._size)):
            if owned:
                first = owned.start - Shard(rank, self._size).kv_heads(self._num_heads).start
                whole[:, owned.start : owned.stop] = self._parts[rank][index][:, first : first + len(owned)]

    def scatter(self, block: Tensor, index: int) -> None:
        """Copies `block`, as `gather` makes it, to all ranks."""
        self._check(index)
        whole = self._heads_of(block)
        for rank, part in enumerate(self._parts):
            heads = Shard(rank, self._size).kv_heads(self._num_heads)
            part[index].copy_(whole[:, heads.start : heads.stop])

    def _heads_of(self, block: Tensor) -> Tensor:
        """[layers, all KV heads, block_size, 2, width] over the bytes of a block."""
        _, layers, _, *rest = self.tensor.shape
        return block.view(self.dtype).view(layers, self._num_heads, *rest)
