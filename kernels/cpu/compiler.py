"""Compilation of the C++ library in `native/`. Must not import project modules or torch: used by setup.py."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "native"
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fno-semantic-interposition"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),  # never -ffast-math: infinities are used
)
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 120.0
"""At a process's start: also how long it waits for another one that compiles the same library."""
BUILD_TIMEOUT_S = 1800.0
"""For a wheel, which a busy machine may build: no request waits for it."""


def find_compiler() -> str:
    """The C++ compiler that `CXX` names, or the first on the path; "" without one."""
    return os.environ.get("CXX") or next((found for name in COMPILERS if (found := shutil.which(name))), "")


def compile_here(compiler: str, flags: Sequence[str], scratch: Path) -> Path:
    """A library that this process can load. Raises OSError or SubprocessError: what the last attempt said."""
    failure: OSError | subprocess.SubprocessError = OSError("no attempt was made")
    for compile_flags, link_flags in _attempts():
        library = scratch / "kernels.so"
        try:
            _compile(compiler, (*flags, *compile_flags), link_flags, scratch / "kernels.o", library)
            ctypes.CDLL(str(library))  # unresolved symbols show here, before other processes see the file
            return library
        except (OSError, subprocess.SubprocessError) as error:
            failure = error
    raise failure


def compile_for_others(compiler: str, flags: Sequence[str], scratch: Path, library: Path) -> None:
    """A library for another machine, whose torch brings the OpenMP runtime. Raises OSError or SubprocessError."""
    _compile(compiler, (*flags, "-fopenmp"), ("-s",), scratch / f"{library.stem}.o", library, BUILD_TIMEOUT_S)


def _attempts() -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Flags to compile and to link with, best first: torch's own OpenMP runtime, the compiler's, or a single thread."""
    if sys.platform == "darwin":  # its compiler hides OpenMP, and its linker refuses undefined symbols unless asked
        yield ("-Xpreprocessor", "-fopenmp"), ("-undefined", "dynamic_lookup")
    yield ("-fopenmp",), ()
    yield ("-fopenmp",), ("-fopenmp",)
    yield (), ()


def _compile(
    compiler: str,
    flags: Sequence[str],
    link_flags: Sequence[str],
    objects: Path,
    library: Path,
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> None:
    target, *rest = flags
    source = str(SOURCES / "native.cpp")
    for command in (
        (compiler, target, *FLAGS, *rest, "-c", source, "-o", str(objects)),
        (compiler, "-shared", *link_flags, str(objects), "-o", str(library)),
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=timeout_s, text=True)
