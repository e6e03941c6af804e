"""The KV cache of one worker. All layers of a block lie together, so a block travels as one range of bytes."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.engine.kv.cuda_driver import DriverError, NotGiven
from common.errors import BlockError, ModelError
from kernels.cpu import prefer_large_pages
from kernels.interface import UNSCALED, KVLayout, KVScales, numbers_of, row_width, scales_of

if TYPE_CHECKING:
    from common.engine.kv.device_memory import ExportedMemory
    from common.engine.kv.shared_memory import SharedMemory
    from common.model_files import ModelConfig

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Approximations of half of bfloat16's size, for a model of any dtype."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of "float32" or "bfloat16"; ModelError for anything else."""
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def cache_dtype(name: str) -> torch.dtype:
    """The torch dtype of "fp8", "int8", or a name that `torch_dtype` takes; ModelError for anything else."""
    return SMALL_DTYPES[name] if name in SMALL_DTYPES else torch_dtype(name)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype | str) -> int:
    """Bytes of one block of `block_size` tokens: every layer, every KV head, keys and values, or latents."""
    kind = cache_dtype(dtype) if isinstance(dtype, str) else dtype
    row_bytes = row_width(config.head_dim, kind) * kind.itemsize
    return config.num_layers * config.num_kv_heads * block_size * kv_parts(config) * row_bytes


def kv_parts(config: ModelConfig) -> int:
    """Rows of numbers that a token has in the cache for a layer and KV head: its key and its value, or its latent."""
    return 1 if config.latent_dim else 2


class KVCache:
    """`.tensor` is [num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), width], contiguous, zero at first.

    Of a model with latents it is [num_blocks, num_layers, 1, block_size, 1, rank + rope_dim]: a key, and in its first
    `rank` numbers the value, of all heads.

    Its width is head_dim; in int8 there is room for scales besides: see `kernels.interface.kv_region`.

    The system maps host memory as it is touched: blocks that were never written cost nothing. `.shared` is the memory
    that other processes may read, None unless `share` asks for it and the system has it. `.exported` is a GPU's
    memory that other GPUs of the host may read, None unless `export` asks for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | str,
        device: torch.device | str = "cpu",
        *,
        share: bool = False,
        export: bool = False,
        scales: Sequence[KVScales] = (),
    ) -> None:
        """`scales`: of each layer, for a cache of fp8 alone; none: all are 1."""
        self.config, self.num_blocks, self.block_size = config, num_blocks, block_size
        self.dtype = cache_dtype(dtype) if isinstance(dtype, str) else dtype
        self.device = torch.device(device)
        self.scales = tuple(scales) or (UNSCALED,) * config.num_layers
        if len(self.scales) != config.num_layers:
            raise ModelError(f"a KV cache of {config.num_layers} layers got the scales of {len(self.scales)}")
        if scales and self.dtype != torch.float8_e4m3fn:
            raise ModelError(f"a KV cache of {dtype} has no scales of layers: they are for fp8")
        self.block_bytes = block_bytes(config, block_size, self.dtype)
        if self.dtype == torch.int8 and config.latent_dim:
            raise ModelError("a KV cache of int8 is not for latents (kv_cache_dtype int8): use auto or fp8")
        if self.dtype == torch.int8 and self.device.type != "cpu":
            raise ModelError(f"a KV cache of int8 is for CPUs: on {device} use fp8 or the model's own type")
        if num_blocks < 1 or block_size < 1:
            raise ModelError(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens holds nothing: raise num_blocks"
            )
        width = row_width(config.head_dim, self.dtype)
        shape = (num_blocks, config.num_layers, config.num_kv_heads, block_size, kv_parts(config), width)
        self._host: memoryview | None = None
        self.shared: SharedMemory | None = None
        self.exported: ExportedMemory | None = None
        try:
            if export:
                self.tensor = self._in_exported_memory(shape)
            elif self.device.type == "cpu":
                self.tensor = self._in_host_memory(shape, share)
            else:
                self.tensor = torch.zeros(shape, dtype=self.dtype, device=self.device)
        except (OSError, RuntimeError, OverflowError, DriverError, NotGiven) as error:
            raise ModelError(
                f"no memory for a KV cache of {num_blocks} blocks ({num_blocks * self.block_bytes / 2**30:.2f} GiB) "
                f"on {device}: lower kv_memory_gib or num_blocks ({error})"
            ) from error

    @property
    def wire_heads(self) -> int:
        """KV heads of a block as it is shipped."""
        return self.config.num_kv_heads

    @property
    def wire_bytes(self) -> int:
        """Bytes of a block as it is shipped."""
        return self.block_bytes

    @property
    def in_host_memory(self) -> bool:
        """Whether a processor reads and writes blocks where they are."""
        return self._host is not None

    @property
    def is_scaled(self) -> bool:
        """Whether any layer has scales other than 1."""
        return any(each != UNSCALED for each in self.scales)

    @property
    def layout(self) -> KVLayout:
        """What attention must know of the tensor."""
        config = self.config
        sizes = (config.num_layers, config.num_kv_heads, self.block_size, config.head_dim, config.latent_dim)
        return KVLayout(self.num_blocks, *sizes)

    def _in_host_memory(self, shape: tuple[int, ...], share: bool) -> Tensor:
        num_bytes = math.prod(shape) * self.dtype.itemsize
        if share:
            # Imported on use, as below: only memory shared with other processes needs the wire's packages.
            from common.engine.kv.shared_memory import NotShared, SharedMemory

            try:
                self.shared = SharedMemory(num_bytes)
            except NotShared as error:
                log.warning("KV memory cannot be shared with this host's decode workers: %s", error)
        pages = self.shared.pages if self.shared else mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_large_pages(pages)
        self._host = memoryview(pages)[:num_bytes]
        return torch.frombuffer(self._host, dtype=self.dtype).view(shape)

    def _in_exported_memory(self, shape: tuple[int, ...]) -> Tensor:
        num_bytes = math.prod(shape) * self.dtype.itemsize
        from common.engine.kv.device_memory import ExportedMemory

        self.exported = exported = ExportedMemory(num_bytes, self.device.index or 0)
        if self.device.type == "cpu":  # where the driver is one for tests
            flat = torch.from_numpy(np.asarray(exported.map))
        else:
            flat = torch.as_tensor(exported.map, device=self.device)
        if flat.data_ptr() != exported.map.address:
            raise DriverError(f"torch takes memory of {self.device} for another device's, and copied it")
        return flat[:num_bytes].view(self.dtype).view(shape).zero_()

    def block(self, index: int) -> memoryview:
        """Writable bytes of one whole block in host memory, no copy. BlockError out of range or off the host."""
        if self._host is None:
            raise BlockError(f"blocks on {self.device} are not in host memory: copy them first")
        self._check(index)
        return self._host[index * self.block_bytes : (index + 1) * self.block_bytes]

    def block_tensor(self, index: int) -> Tensor:
        """One whole block on its device, no copy: `tensor` less its first dimension. BlockError out of range."""
        self._check(index)
        return self.tensor[index]

    def clear_slots(self, index: int, first: int) -> None:
        """Zero the slots of a block from `first` on, in every layer. BlockError when it is out of range."""
        clear_slots(self.block_tensor(index), first)

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_blocks:
            raise BlockError(f"block {index} is not one of {self.num_blocks} blocks")


def clear_slots(block: Tensor, first: int) -> None:
    """Zeros the slots of [layers, KV heads, block_size, 2, width] from `first` on."""
    if block.dtype == torch.int8:
        numbers_of(block)[:, :, first:] = 0
        scales_of(block)[..., first:] = 0.0
    else:
        block[:, :, first:] = 0
