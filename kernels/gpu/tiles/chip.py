"""Properties of a GPU that determine the kernels' tiles."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

KIB = 1024
"""Bytes of a KiB."""


class Chip(NamedTuple):
    """A GPU's properties.

    capability: NVIDIA's compute capability, or ROCm's value, which is (9, 4) for gfx942 (MI300X): compare `vendor` too.
    shared_bytes: maximum shared memory of a program.
    """

    vendor: Literal["nvidia", "amd"]
    capability: tuple[int, int]
    shared_bytes: int

    @property
    def multiplies_by_warpgroup(self) -> bool:
        """Whether tensor cores read whole tiles from shared memory, as Hopper's `wgmma` and Blackwell's `tcgen05` do.

        Other chips, including consumer Blackwell (12.x), keep a warp's share of the tiles in registers.
        """
        return self.vendor == "nvidia" and (9, 0) <= self.capability < (12, 0)

    @property
    def has_tma(self) -> bool:
        """Whether the chip can copy boxes of tensors to shared memory."""
        return self.vendor == "nvidia" and self.capability >= (9, 0)

    @property
    def converts_e4m3(self) -> bool:
        """Whether the chip has instructions for e4m3 numbers. gfx942's are for e4m3fnuz, with a different bias."""
        return self.capability >= ((8, 9) if self.vendor == "nvidia" else (9, 5))

    @property
    def has_little_memory(self) -> bool:
        """Whether it has less shared memory than an A100 (163 KiB): NVIDIA's 8.6, 8.9, 12.x (99 KiB), all of AMD's."""
        return self.shared_bytes < 160 * KIB


HOPPER = Chip("nvidia", (9, 0), 227 * KIB)


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """Return the chip of a device; for a CPU, the chip that Triton's interpreter simulates."""
    if device.type != "cuda":
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
    return Chip("amd" if torch.version.hip else "nvidia", (found.major, found.minor), shared)
