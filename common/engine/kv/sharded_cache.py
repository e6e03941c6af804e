"""KV cache of a worker whose ranks each store some of its KV heads, as seen by rank 0.

    block of the worker   [layer][head 0 | head 1 | head 2 | head 3][slot][K|V][head_dim]
    block of rank 0       [layer][head 0 | head 1] ...       of rank 1   [layer][head 2 | head 3] ...

Rank 0 maps the memory of the other ranks. The wire format and the checksums use whole blocks, so the number of ranks
may differ between workers.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.engine.kv.cache import KVCache, clear_slots
from common.engine.kv.step_order import StepOrder
from common.errors import BlockError, ModelError
from common.model_files.architecture import Shard, kv_owners
from kernels.interface import KVScales

if TYPE_CHECKING:
    from common.model_files import ModelConfig


class ShardedCache(KVCache):
    """Rank 0's own cache, used by its steps, plus the memory of other ranks. `gather` and `scatter` access blocks."""

    def __init__(
        self,
        whole: ModelConfig,
        num_ranks: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | str,
        device: torch.device | str = "cpu",
        scales: Sequence[KVScales] = (),
    ) -> None:
        super().__init__(Shard(0, num_ranks).of(whole), num_blocks, block_size, dtype, device, scales=scales)
        self._num_heads, self._size = whole.num_kv_heads, num_ranks
        self._parts: list[Tensor] = [self.tensor]
        self._order = StepOrder(self.tensor.device)

    def attach(self, part: Tensor) -> None:
        """Add the cache of the next rank, in memory that this process can access.

        Raises ModelError if its shape or dtype differs.
        """
        if part.shape != self.tensor.shape or part.dtype != self.dtype:  # all ranks have the same number of heads
            found, wanted = (f"{list(each.shape)} of {each.dtype}" for each in (part, self.tensor))
            raise ModelError(f"the KV cache of rank {len(self._parts)} is {found}, but that of rank 0 is {wanted}")
        self._parts.append(part)

    def attach_file(self, descriptor: int) -> None:
        """Map the memory file of the next rank. Raises ModelError if it is too small, or OSError."""
        num_bytes = self.tensor.numel() * self.dtype.itemsize
        try:
            pages = mmap.mmap(descriptor, num_bytes)
        except ValueError as error:
            raise ModelError(f"the KV memory of rank {len(self._parts)} is smaller than {num_bytes} bytes") from error
        self.attach(torch.frombuffer(memoryview(pages), dtype=self.dtype).view(self.tensor.shape))

    def block(self, index: int) -> memoryview:
        raise BlockError("a block split across ranks has no contiguous bytes: use gather")

    @property
    def wire_heads(self) -> int:
        return self._num_heads

    @property
    def wire_bytes(self) -> int:
        return self.block_bytes // self.config.num_kv_heads * self._num_heads

    def new_block(self) -> Tensor:
        """Allocate one whole block on rank 0's device: [layers, all KV heads, block_size, 2, width]."""
        _, layers, _, *rest = self.tensor.shape
        return torch.empty(layers, self._num_heads, *rest, dtype=self.dtype, device=self.device)

    def clear_slots(self, index: int, first: int) -> None:
        """Zero the slots on every rank, before the next step runs. Call it on the thread that launches steps."""
        self._check(index)
        self._order.run([(part.device, partial(clear_slots, part[index], first)) for part in self._parts])

    def gather(self, index: int, block: Tensor) -> None:
        """Copy a block of all ranks into `block`, uint8 [wire_bytes] on any device.

        Waits for the copy if `block` is in host memory. Raises BlockError if the index is out of range.
        """
        self._check(index)
        whole = self._heads_of(block)
        for rank, owned in enumerate(kv_owners(self._num_heads, self._size)):
            if owned:
                first = owned.start - Shard(rank, self._size).kv_heads(self._num_heads).start
                whole[:, owned.start : owned.stop] = self._parts[rank][index][:, first : first + len(owned)]

    def scatter(self, block: Tensor, index: int) -> None:
        """Copy `block`, in the format of `gather`, to all ranks."""
        self._check(index)
        whole = self._heads_of(block)
        for rank, part in enumerate(self._parts):
            heads = Shard(rank, self._size).kv_heads(self._num_heads)
            part[index].copy_(whole[:, heads.start : heads.stop])

    def _heads_of(self, block: Tensor) -> Tensor:
        """View a block's bytes as [layers, all KV heads, block_size, 2, width]."""
        _, layers, _, *rest = self.tensor.shape
        return block.view(self.dtype).view(layers, self._num_heads, *rest)
