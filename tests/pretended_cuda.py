"""A driver of CUDA over memory files, compiled against the real cuda.h: what GPUs would share, between real processes.

The device of a cache in it is the CPU, whose addresses are the pretended GPU's.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

import common.engine.kv.cuda_driver as drivers

SOURCE = Path(__file__).with_suffix(".c")
(TRITON,) = find_spec("triton").submodule_search_locations  # type: ignore[union-attr, misc] # not imported: it is slow
HEADERS = Path(TRITON) / "backends/nvidia/include"


def build() -> str:
    """The library, compiled once for all processes of a machine."""
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"diptych-pretended-cuda-{os.getuid()}-{name}.so"
    if not library.exists():
        compiler = shutil.which("cc") or shutil.which("clang") or "gcc"
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "driver.so"
            flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-I{HEADERS}")
            subprocess.run([compiler, *flags, "-o", str(made), str(SOURCE)], check=True, timeout=60)
            moved = library.with_suffix(f".{os.getpid()}")
            shutil.copy(made, moved)
            moved.replace(library)  # at once: other processes may be loading it
    return str(library)


def use() -> None:
    """This process has the pretended driver from now on."""
    drivers.LIBRARY = build()  # type: ignore[misc]
    drivers.driver.cache_clear()


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has the pretended driver within; what was mapped by it is unmapped by it."""
    monkeypatch.setattr(drivers, "LIBRARY", build())
    drivers.driver.cache_clear()
    yield
    gc.collect()
    drivers.driver.cache_clear()
