"""Which devices Triton's kernels serve, and which one a thread launches them on."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

logger = logging.getLogger(__name__)


@functools.cache
def triton_backend(kind: str) -> ModuleType | None:
    """`kernels.gpu.backend` for device type "cuda", or None where Triton is not installed or cannot launch."""
    if kind != "cuda":
        return None
    missing = missing_to_launch()
    try:
        found = importlib.import_module("kernels.gpu.backend")
    except ImportError as error:
        missing = f"Triton ({error})"
    if missing:
        logger.warning("kernels of %s: plain torch, several times slower, for want of %s", kind, missing)
        return None
    logger.info("kernels of %s: Triton", kind)
    return found


def missing_to_launch() -> str:
    """What Triton builds its launchers with and this machine lacks, or "": it would say so in the first step only."""
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return "" if has_compiler else "a C compiler (gcc, clang, or what CC names)"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one of this thread, which kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
