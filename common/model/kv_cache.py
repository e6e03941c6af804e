"""The KV cache of one worker: all layers of a block lie together, so that a block is one contiguous range on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diptych.common.errors import BlockError, ModelError

if TYPE_CHECKING:
    from diptych.common.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of "float32" or "bfloat16"; ModelError for anything else."""
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype | str) -> int:
    """Bytes of one block of `block_size` tokens: every layer, every KV head, keys and values."""
    itemsize = (torch_dtype(dtype) if isinstance(dtype, str) else dtype).itemsize
    return config.num_layers * config.num_kv_heads * block_size * 2 * config.head_dim * itemsize


class KVCache:
    """`.tensor` is [num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), head_dim], contiguous, zero at first.

    Host memory is mapped lazily by the system: blocks that were never written cost nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | str,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.num_blocks, self.block_size = config, num_blocks, block_size
        self.dtype = torch_dtype(dtype) if isinstance(dtype, str) else dtype
        self.device = torch.device(device)
        self.block_bytes = block_bytes(config, block_size, self.dtype)
        shape = (num_blocks, config.num_layers, config.num_kv_heads, block_size, 2, config.head_dim)
        try:
            self.tensor: Tensor = torch.zeros(shape, dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            size = num_blocks * self.block_bytes
            raise ModelError(
                f"no memory for a KV cache of {num_blocks} blocks ({size / 2**30:.2f} GiB) on {device}: "
                f"lower kv_memory_gib or num_blocks ({error})"
            ) from error
        self._host = memoryview(self.tensor.view(torch.uint8).numpy()).cast("B") if self.device.type == "cpu" else None

    def block(self, index: int) -> memoryview:
        """Writable bytes of one whole block in host memory, no copy. BlockError out of range or off the host."""
        if self._host is None:
            raise BlockError(f"blocks on {self.device} are not in host memory: copy them first")
        if not 0 <= index < self.num_blocks:
            raise BlockError(f"block {index} is not one of {self.num_blocks} blocks")
        return self._host[index * self.block_bytes : (index + 1) * self.block_bytes]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one whole block onto another, on the device."""
        for index in (source, target):
            if not 0 <= index < self.num_blocks:
                raise BlockError(f"block {index} is not one of {self.num_blocks} blocks")
        self.tensor[target].copy_(self.tensor[source])
