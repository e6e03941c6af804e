"""The two rates behind every floor, measured first: bytes a second copied, FLOPs a second multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Timer
from kernels.gpu.tiles.chip import chip_of


@dataclass(frozen=True, slots=True)
class Chip:
    """`copy_rate`: bytes read plus bytes written a second. `matmul_rate`: FLOPs a second in the shape's dtype."""

    name: str
    copy_rate: float
    matmul_rate: float

    def floor(self, num_bytes: float, num_flops: float) -> float:
        """Least seconds for work of this size."""
        return max(num_bytes / self.copy_rate, num_flops / self.matmul_rate)


def measure_chip(shape: GPUShape, timer: Timer) -> Chip:
    return Chip(device_name(timer.device), copy_rate(shape, timer), matmul_rate(shape, timer))


def copy_rate(shape: GPUShape, timer: Timer) -> float:
    """From device memory to device memory, far larger than any cache."""
    source = torch.ones(shape.copy_bytes // 2, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return shape.copy_bytes / timer.calls([lambda: target.copy_(source)])


def matmul_rate(shape: GPUShape, timer: Timer) -> float:
    """The best of a few sizes, on random numbers: zeros draw less power, and clocks depend on it."""
    rates = []
    for size in (shape.matmul_size // 2, shape.matmul_size, shape.matmul_size * 2):
        a, b = (torch.randn(size, size, device=timer.device).to(shape.dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates.append(2 * size**3 / timer.calls([lambda a=a, b=b, out=out: torch.matmul(a, b, out=out)]))  # type: ignore[misc]
    return max(rates)


def numbered(device: torch.device) -> torch.device:
    """The current device for "cuda": torch cannot make a device without a number current."""
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (dry run)"


def versions(device: torch.device) -> dict[str, Any]:
    """Versions and properties that the figures depend on."""
    import triton

    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "device": device_name(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "shared_kib": chip_of(device).shared_bytes / 2**10,
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        }
    if find_spec("flashinfer") is not None:
        found["flashinfer"] = version("flashinfer-python")
    return found
