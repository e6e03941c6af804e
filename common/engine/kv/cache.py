"""KV cache of one worker. All layers of a block are contiguous, so a block is transferred as one byte range."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.engine.kv.cuda_driver import DescriptorError, DriverError
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
"""Quantised dtypes, half the size of bfloat16, available for models of any dtype."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for "float32" or "bfloat16". Raises ModelError for other names."""
    if name not in DTYPES:
        raise ModelError(f"unsupported dtype {name!r}: must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def cache_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for "fp8", "int8" or a name that `torch_dtype` accepts. Raises ModelError otherwise."""
    return SMALL_DTYPES[name] if name in SMALL_DTYPES else torch_dtype(name)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype | str) -> int:
    """Return the bytes of one block of `block_size` tokens: all layers and KV heads, keys and values or latents."""
    kind = cache_dtype(dtype) if isinstance(dtype, str) else dtype
    row_bytes = row_width(config.head_dim, kind) * kind.itemsize
    return config.num_layers * config.num_kv_heads * block_size * kv_parts(config) * row_bytes


def kv_parts(config: ModelConfig) -> int:
    """Return the rows per token, layer and KV head: 2 (key and value), or 1 (latent)."""
    return 1 if config.latent_dim else 2


class KVCache:
    """KV memory of one worker.

    `.tensor` is [num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), width], contiguous and initially zero.
    For models with latents it is [num_blocks, num_layers, 1, block_size, 1, rank + rope_dim]. A latent row is the key
    of all heads, and its first `rank` elements are the value.

    The width is head_dim, plus space for scales in int8; see `kernels.interface.kv_region`.

    Host memory is mapped on first touch, so unused blocks cost nothing. `.shared` is memory that other processes may
    read; None unless `share` is set and the system supports it. `.exported` is GPU memory that other GPUs of the host
    may read; None unless `export` is set.
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
        """`scales`: one per layer, only for an fp8 cache. Empty means all scales are 1."""
        self.config, self.num_blocks, self.block_size = config, num_blocks, block_size
        self.dtype = cache_dtype(dtype) if isinstance(dtype, str) else dtype
        self.device = torch.device(device)
        self.scales = tuple(scales) or (UNSCALED,) * config.num_layers
        if len(self.scales) != config.num_layers:
            raise ModelError(f"the KV cache has {config.num_layers} layers but scales for {len(self.scales)}")
        if scales and self.dtype != torch.float8_e4m3fn:
            raise ModelError(f"KV scales require kv_cache_dtype fp8, not {dtype}")
        self.block_bytes = block_bytes(config, block_size, self.dtype)
        if self.dtype == torch.int8 and config.latent_dim:
            raise ModelError("kv_cache_dtype int8 is not supported for models with latent attention: use auto or fp8")
        if self.dtype == torch.int8 and self.device.type != "cpu":
            raise ModelError(f"kv_cache_dtype int8 is supported only on CPUs: on {device} use auto or fp8")
        if num_blocks < 1 or block_size < 1:
            raise ModelError(
                f"invalid KV cache size of {num_blocks} blocks of {block_size} tokens: both must be at least 1"
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
        except (OSError, RuntimeError, OverflowError, DriverError, DescriptorError) as error:
            raise ModelError(
                f"cannot allocate a KV cache of {num_blocks} blocks ({num_blocks * self.block_bytes / 2**30:.2f} GiB) "
                f"on {device}: lower kv_memory_gib or num_blocks ({error})"
            ) from error

    @property
    def wire_heads(self) -> int:
        """KV heads per block on the wire."""
        return self.config.num_kv_heads

    @property
    def wire_bytes(self) -> int:
        """Bytes per block on the wire."""
        return self.block_bytes

    @property
    def in_host_memory(self) -> bool:
        """Whether blocks are in host memory, where they are read and written in place."""
        return self._host is not None

    @property
    def is_scaled(self) -> bool:
        """Whether any layer has scales other than 1."""
        return any(each != UNSCALED for each in self.scales)

    @property
    def layout(self) -> KVLayout:
        """Tensor dimensions that attention kernels use."""
        config = self.config
        sizes = (config.num_layers, config.num_kv_heads, self.block_size, config.head_dim, config.latent_dim)
        return KVLayout(self.num_blocks, *sizes)

    def _in_host_memory(self, shape: tuple[int, ...], share: bool) -> Tensor:
        num_bytes = math.prod(shape) * self.dtype.itemsize
        if share:
            # Imported lazily, like device_memory below: only shared memory needs the wire packages.
            from common.engine.kv.shared_memory import SharedMemory, SharedMemoryError

            try:
                self.shared = SharedMemory(num_bytes)
            except SharedMemoryError as error:
                log.warning("cannot share KV memory with decode workers on this host: %s", error)
        pages = self.shared.pages if self.shared else mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_large_pages(pages)
        self._host = memoryview(pages)[:num_bytes]
        return torch.frombuffer(self._host, dtype=self.dtype).view(shape)

    def _in_exported_memory(self, shape: tuple[int, ...]) -> Tensor:
        num_bytes = math.prod(shape) * self.dtype.itemsize
        from common.engine.kv.device_memory import ExportedMemory

        self.exported = exported = ExportedMemory(num_bytes, self.device.index or 0)
        if self.device.type == "cpu":  # the driver is a test double
            flat = torch.from_numpy(np.asarray(exported.map))
        else:
            flat = torch.as_tensor(exported.map, device=self.device)
        if flat.data_ptr() != exported.map.address:
            raise DriverError(f"torch copied the memory of {self.device}, taking it for another device's")
        return flat[:num_bytes].view(self.dtype).view(shape).zero_()

    def block(self, index: int) -> memoryview:
        """Return the writable bytes of one block in host memory, without a copy.

        Raises BlockError if the index is out of range or the cache is not in host memory.
        """
        if self._host is None:
            raise BlockError(f"cannot access a block on {self.device} from the host: copy it first")
        self._check(index)
        return self._host[index * self.block_bytes : (index + 1) * self.block_bytes]

    def block_tensor(self, index: int) -> Tensor:
        """Return a view of one block on its device: `tensor` without its first dimension.

        Raises BlockError if the index is out of range.
        """
        self._check(index)
        return self.tensor[index]

    def clear_slots(self, index: int, first: int) -> None:
        """Zero the slots of a block from `first`, in every layer. Raises BlockError if the index is out of range."""
        clear_slots(self.block_tensor(index), first)

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_blocks:
            raise BlockError(f"invalid block {index}: the cache has {self.num_blocks} blocks")


def clear_slots(block: Tensor, first: int) -> None:
    """Zero the slots of a block [layers, KV heads, block_size, 2, width] from `first`."""
    if block.dtype == torch.int8:
        numbers_of(block)[:, :, first:] = 0
        scales_of(block)[..., first:] = 0.0
    else:
        block[:, :, first:] = 0
