"""GPUs that the kernels support, missing requirements, and the device on which a thread launches kernels."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

LEAST_TRITON = (3, 5)
"""The oldest version of Triton with which the tests compile every kernel."""
LEAST_CAPABILITY = (8, 0)
"""Minimum compute capability of NVIDIA's chips: the first that multiplies bfloat16."""
AMD_CHIPS = ("gfx90a", "gfx942", "gfx950")
"""AMD's chips with matrix cores for bfloat16 and at least 64 KiB of shared memory per program."""


def usable_gpus() -> tuple[int, str]:
    """Return the number of GPUs, from index 0, that torch and the kernels can use, and why if it is 0."""
    if torch.version.cuda is None and torch.version.hip is None:
        return 0, f"torch {torch.__version__} is a CPU build; install PyTorch's build for this GPU to use it"
    try:
        with warnings.catch_warnings():  # torch also raises what it warns of
            warnings.simplefilter("ignore")
            torch.cuda.init()  # type: ignore[no-untyped-call]
            count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        return 0, f"torch finds no GPU ({_first_line(error)})"
    if not count:
        return 0, "torch finds no GPU"
    if missing := missing_to_launch():
        return 0, f"the GPU's kernels need {missing}"
    for index in range(count):
        if refusal := unsupported(index):
            return index, "" if index else refusal
    return count, ""


def unsupported(index: int) -> str:
    """Return why the kernels do not support a GPU, or ""."""
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        chip = found.gcnArchName.partition(":")[0]
        return "" if chip in AMD_CHIPS else f"the kernels support {', '.join(AMD_CHIPS)}, but {found.name} is {chip}"
    if (found.major, found.minor) >= LEAST_CAPABILITY:
        return ""
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"the kernels need compute capability {least}, but {found.name} has {found.major}.{found.minor}"


def missing_to_launch() -> str:
    """Return what is missing to build Triton's launchers, or "". Triton itself would fail only in the first step."""
    try:
        import triton
    except ImportError as error:
        return f"Triton ({_first_line(error)})"
    version = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if version < LEAST_TRITON:
        return f"Triton {LEAST_TRITON[0]}.{LEAST_TRITON[1]} or newer ({triton.__version__} is installed)"
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return "" if has_compiler else "a C compiler (gcc, clang, or what CC names)"


def too_large(error: BaseException) -> str:
    """Describe the resource that a kernel needs and the GPU does not have, if that is Triton's error; else ""."""
    if type(error).__name__ != "OutOfResources":  # compared by name, because Triton may be missing
        return ""
    needed, limit, what = (getattr(error, name, 0) for name in ("required", "limit", "name"))
    return f"a kernel needs {needed:,} bytes of {what}, but this GPU has {limit:,}"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current device of this thread, on which kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
