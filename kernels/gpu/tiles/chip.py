"""Properties of a GPU by which the kernels choose their tiles."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

KIB = 1024
"""Bytes of a KiB."""


class Chip(NamedTuple):
    """A GPU as the kernels see it.

    capability: NVIDIA's compute capability, or what ROCm reports: (9, 4) of gfx942, an MI300X, which is no Hopper.
    shared_bytes: shared memory that one program may use.
    """

    vendor: Literal["nvidia", "amd"]
    capability: tuple[int, int]
    shared_bytes: int

    @property
    def multiplies_by_warpgroup(self) -> bool:
        """Whether tensor cores read whole tiles from shared memory, as Hopper's `wgmma` and Blackwell's `tcgen05` do.

        Other chips, consumer Blackwell (12.x) among them, keep a warp's share of the tiles in registers.
        """
        return self.vendor == "nvidia" and (9, 0) <= self.capability < (12, 0)

    @property
    def has_tma(self) -> bool:
        """Whether it copies boxes of tensors to shared memory."""
        return self.vendor == "nvidia" and self.capability >= (9, 0)

    @property
    def converts_e4m3(self) -> bool:
        """Whether it has instructions for e4m3 numbers. Those of gfx942 are for e4m3fnuz, which has another bias."""
        return self.capability >= ((8, 9) if self.vendor == "nvidia" else (9, 5))

    @property
    def has_little_memory(self) -> bool:
        """Whether it has less shared memory than an A100 (163 KiB): NVIDIA's 8.6, 8.9 and 12.x (99 KiB), and AMD's."""
        return self.shared_bytes < 160 * KIB


HOPPER = Chip("nvidia", (9, 0), 227 * KIB)


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a device; for a CPU the one that Triton's interpreter stands for."""
    if device.type != "cuda":
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
    return Chip("amd" if torch.version.hip else "nvidia", (found.major, found.minor), shared)
