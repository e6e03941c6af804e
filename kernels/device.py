"""What this machine lacks for kernels of a GPU, and which device a thread launches them on."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext

import torch


def missing_to_launch() -> str:
    """What this machine lacks for Triton to build its launchers, or "": Triton itself fails only in the first step."""
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return "" if has_compiler else "a C compiler (gcc, clang, or what CC names)"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one of this thread, which kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
