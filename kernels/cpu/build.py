"""Compiles `native/` for this machine, once, and loads it. Without a C++ compiler plain torch serves instead."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch  # loads the OpenMP runtime whose threads the library shares

log = logging.getLogger("kernels")

SOURCES = Path(__file__).parents[1] / "native"
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fno-semantic-interposition"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),  # never -ffast-math: infinities are used
)
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 120.0
"""Also how long a process waits for another one that compiles the same library."""


@functools.cache
def load_native() -> ctypes.CDLL | None:
    """The library, compiled at a machine's first call and kept in the cache; None, and a warning, without one."""
    try:
        library = _load(_cache_folder())
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("CPU kernels cannot be built (%s): attention runs on the slower torch path", _reason(error))
        return None
    log.info("CPU kernels: compiled for this machine, %d threads", torch.get_num_threads())
    return library


def _cache_folder() -> Path:
    return Path(os.environ.get("DIPTYCH_CACHE") or Path.home() / ".cache" / "diptych") / "native"


def _load(folder: Path) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or next((found for name in COMPILERS if (found := shutil.which(name))), "")
    target = folder / f"kernels-{_key(compiler)}.so"
    if (library := _built(target)) is not None:
        return library
    if not compiler:
        raise OSError("no C++ compiler among " + ", ".join(COMPILERS))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _turn(folder), tempfile.TemporaryDirectory(dir=folder) as scratch:
        return _built(target) or _build(compiler, Path(scratch), target)


def _built(target: Path) -> ctypes.CDLL | None:
    """The library that was built before, if it is there and loads."""
    if not target.exists():
        return None
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        log.warning("%s does not load (%s): building it again", target, error)
        return None


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Lets one process at a time compile: the workers of a machine start together, and want the same library."""
    until = time.monotonic() + COMPILE_TIMEOUT_S
    held = os.open(folder, os.O_RDONLY)
    try:
        while time.monotonic() < until:  # the lock of a process that dies goes with it
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # a file system without locks: twice the work, and the same library
                break
        yield
    finally:
        os.close(held)


def _attempts() -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Flags to compile and to link with, best first: torch's own OpenMP runtime, the compiler's, or a single thread."""
    if sys.platform == "darwin":  # its compiler hides OpenMP, and its linker refuses undefined symbols unless asked
        yield ("-Xpreprocessor", "-fopenmp"), ("-undefined", "dynamic_lookup")
    yield ("-fopenmp",), ()
    yield ("-fopenmp",), ("-fopenmp",)
    yield (), ()


def _build(compiler: str, scratch: Path, target: Path) -> ctypes.CDLL:
    log.info("compiling CPU kernels for this machine, about 20 s, once")
    failure: OSError | subprocess.SubprocessError = OSError("no attempt was made")
    for compile_flags, link_flags in _attempts():
        objects, library = scratch / "kernels.o", scratch / "kernels.so"
        try:
            flags = (_kind(), *FLAGS, *compile_flags)
            _run(compiler, *flags, "-c", str(SOURCES / "native.cpp"), "-o", str(objects))
            _run(compiler, "-shared", *link_flags, str(objects), "-o", str(library))
            ctypes.CDLL(str(library))  # unresolved symbols show here, before other processes see the file
        except (OSError, subprocess.SubprocessError) as error:
            failure = error
            continue
        library.replace(target)
        return ctypes.CDLL(str(target))
    raise failure


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S, text=True)


def _key(compiler: str) -> str:
    """Changes with the source, the flags, the compiler and the CPU: code of -march=native runs on its own kind only."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    digest.update("\0".join((_kind(), *FLAGS, compiler, platform.machine(), _cpu(), torch.__version__)).encode())
    return digest.hexdigest()


def _kind() -> str:
    """The compiler's flag for this machine, or for an older kind that DIPTYCH_MARCH names."""
    named = os.environ.get("DIPTYCH_MARCH")
    if sys.platform == "darwin" and platform.machine() == "arm64" and not named:
        return "-mcpu=native"  # Apple's compiler knows no native -march there
    return f"-march={named or 'native'}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _reason(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    return str(output).strip().splitlines()[0] if output else str(error)
