"""Compilation of the C++ library in `native/`. Must not import project modules or torch: used by setup.py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "native"
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fno-semantic-interposition"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),  # never -ffast-math: infinities are used
)
COMPILERS = ("c++", "g++", "clang++")
STALL_S = 120.0
"""Time without progress, in seconds, after which a compiler is killed, or another process's compilation is not awaited.
Progress is CPU time that the compiler used, so a busy machine only makes it slow."""
COMPILE_TIMEOUT_S = 1800.0
"""Maximum time of a compiler, in seconds."""
PROGRESS_S = 0.5
"""Interval, in seconds, at which progress is measured."""


def find_compiler() -> str:
    """The C++ compiler that `CXX` names, or the first on the path; "" without one."""
    return os.environ.get("CXX") or next((found for name in COMPILERS if (found := shutil.which(name))), "")


def compile_here(compiler: str, flags: Sequence[str], scratch: Path, on_progress: Callable[[], object]) -> Path:
    """A library that this process can load. Raises OSError or SubprocessError: what the last attempt said."""
    failure: OSError | subprocess.SubprocessError = OSError("no attempt was made")
    for compile_flags, link_flags in _attempts():
        library = scratch / "kernels.so"
        try:
            _compile(compiler, (*flags, *compile_flags), link_flags, scratch / "kernels.o", library, on_progress)
            ctypes.CDLL(str(library))  # unresolved symbols show here, before other processes see the file
            return library
        except (OSError, subprocess.SubprocessError) as error:
            failure = error
    raise failure


def compile_for_others(compiler: str, flags: Sequence[str], scratch: Path, library: Path) -> None:
    """A library for another machine, whose torch brings the OpenMP runtime. Raises OSError or SubprocessError."""
    _compile(compiler, (*flags, "-fopenmp"), ("-s",), scratch / f"{library.stem}.o", library)


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
    on_progress: Callable[[], object] = lambda: None,
) -> None:
    target, *rest = flags
    source = str(SOURCES / "native.cpp")
    for command in (
        (compiler, target, *FLAGS, *rest, "-c", source, "-o", str(objects)),
        (compiler, "-shared", *link_flags, str(objects), "-o", str(library)),
    ):
        run_compiler(command, on_progress)


def run_compiler(
    command: Sequence[str],
    on_progress: Callable[[], object],
    stall_s: float = STALL_S,
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> None:
    """Run a compiler, and call `on_progress` about twice a second while it computes.

    Raises CalledProcessError, TimeoutExpired after `stall_s` without progress or after `timeout_s`, or OSError.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            used_s, began = 0.0, time.monotonic()
            moved = began
            while process.poll() is None:
                now, before_s = time.monotonic(), used_s
                used_s = session_cpu_s(process.pid)
                if used_s != before_s:
                    moved = now
                    on_progress()
                if now - moved > stall_s or now - began > timeout_s:
                    raise subprocess.TimeoutExpired(command, now - began)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PROGRESS_S)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # the driver and the compiler that it started
                process.wait()
        if process.returncode:
            output.seek(0)
            raise subprocess.CalledProcessError(process.returncode, command, stderr=output.read())


def session_cpu_s(leader: int) -> float:
    """Return the CPU time of the processes of a session, in seconds. Without /proc, the time, which always advances."""
    if not Path("/proc/self/stat").exists():
        return time.monotonic()
    ticks = 0
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = process.read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:13])) if int(fields[3]) == leader else 0
    return ticks / os.sysconf("SC_CLK_TCK")
