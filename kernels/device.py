"""Which devices Triton's kernels serve, and which one a thread launches them on."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from contextlib import AbstractContextManager, nullcontext

import torch

from kernels.interface.kernels import DeviceKernels

logger = logging.getLogger(__name__)


@functools.cache
def triton_backend(kind: str) -> DeviceKernels | None:
    """`kernels.gpu.backend` for device type "cuda"; None where Triton is not installed or cannot launch."""
    if kind != "cuda":
        return None
    missing = missing_to_launch()
    try:
        import kernels.gpu.backend as found
    except ImportError as error:
        missing = f"Triton ({error})"
    if missing:
        logger.warning("kernels of %s: plain torch, several times slower, for want of %s", kind, missing)
        return None
    logger.info("kernels of %s: Triton", kind)
    return found


def has_device_kernels(kind: str) -> bool:
    """Whether the backend of this device type is `DeviceKernels`."""
    return triton_backend(kind) is not None


def missing_to_launch() -> str:
    """What this machine lacks for Triton to build its launchers, or "": Triton itself fails only in the first step."""
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return "" if has_compiler else "a C compiler (gcc, clang, or what CC names)"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one of this thread, which kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
