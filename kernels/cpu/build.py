"""Loads the kernels of `native/`, either from the wheel or compiled once for this machine.

If neither is possible, plain torch is used.
"""

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch  # loads the OpenMP runtime whose threads the library shares

from kernels.cpu.compiler import COMPILERS, FLAGS, SOURCES, STALL_S, compile_here, find_compiler
from kernels.cpu.instruction_sets import features_here, that_run

log = logging.getLogger("kernels")

LOCKED, UNLOCKED = "compiling-", "compiling_too-"
"""Prefixes of folders in the cache, each of a process that compiles with the lock, or without it."""
SHIPPED = SOURCES / "built"
"""Folder of an installed wheel with libraries for several kinds of CPU (setup.py). A source checkout has none."""


@functools.cache
def load_native() -> ctypes.CDLL | None:
    """Return the library, compiling it on the first call if necessary. Log a warning and return None on failure."""
    if (shipped := _shipped()) is not None:
        return shipped
    try:
        library = _load(_cache_folder())
    except (OSError, subprocess.SubprocessError) as error:
        place = f"in {_cache_folder()}, where {_free_bytes(_cache_folder()):,} bytes are free"
        log.warning(
            "CPU kernels cannot be built %s (%s): attention runs on the slower torch path", place, _reason(error)
        )
        return None
    log.info("CPU kernels: compiled for this machine, %d threads", torch.get_num_threads())
    return library


def _shipped() -> ctypes.CDLL | None:
    """Return the wheel's best library for this CPU. None if there is none or DIPTYCH_MARCH is set."""
    if os.environ.get("DIPTYCH_MARCH") or not SHIPPED.is_dir():
        return None
    for each in that_run(platform.machine(), features_here()):
        if (library := _built(SHIPPED / f"{each.name}.so", "trying the next")) is not None:
            log.info("CPU kernels: built for %s, %d threads", each.name, torch.get_num_threads())
            return library
    log.warning("none of the kernels in %s runs on this CPU: compiling them for it", SHIPPED)
    return None


def _cache_folder() -> Path:
    return Path(os.environ.get("DIPTYCH_CACHE") or Path.home() / ".cache" / "diptych") / "native"


def _load(folder: Path) -> ctypes.CDLL:
    compiler = find_compiler()
    target = folder / f"kernels-{_key(compiler)}.so"
    if (library := _built(target)) is not None:
        return library
    if not compiler:
        raise OSError("no C++ compiler among " + ", ".join(COMPILERS))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _turn(folder) as is_locked:
        if (library := _built(target)) is not None:
            return library
        with tempfile.TemporaryDirectory(prefix=LOCKED if is_locked else UNLOCKED, dir=folder) as scratch:
            log.info("compiling CPU kernels for this machine, 20 s to a minute, once")
            compile_here(compiler, (_kind(),), Path(scratch), lambda: os.utime(folder)).replace(target)
        return ctypes.CDLL(str(target))


def _built(target: Path, otherwise: str = "building it again") -> ctypes.CDLL | None:
    """Load an existing library. Return None if it is missing or cannot be loaded."""
    if not target.exists():
        return None
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        log.warning("%s does not load (%s): %s", target, error, otherwise)
        return None


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Let one process at a time compile, because the workers of a machine start together and need the same library.

    The process that compiles touches the folder while it makes progress. The others stop waiting `STALL_S` after the
    last touch, and compile too. Yields whether this process has the lock: its owner deletes what killed owners left.
    """
    held, touched, moved, is_locked = os.open(folder, os.O_RDONLY), 0, 0.0, False
    try:
        while True:  # the kernel releases the lock of a dead process
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                before, touched = touched, os.fstat(held).st_mtime_ns
                if not before:
                    log.info("waiting for another process that compiles the CPU kernels")
                if touched != before:
                    moved = time.monotonic()
                if time.monotonic() - moved > STALL_S:
                    log.warning("the process that compiles the CPU kernels makes no progress: compiling them here too")
                    break
                time.sleep(0.1)
            except OSError:  # no locks on this file system: compile twice, with the same result
                break
            else:
                is_locked = True
                for left in folder.glob(f"{LOCKED}*"):
                    shutil.rmtree(left, ignore_errors=True)
                break
        yield is_locked
    finally:
        os.close(held)


def _key(compiler: str) -> str:
    """Return a hash of sources, flags, compiler and CPU. Code compiled with -march=native only runs on the same CPU."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    digest.update("\0".join((_kind(), *FLAGS, compiler, platform.machine(), _cpu(), torch.__version__)).encode())
    return digest.hexdigest()


def _kind() -> str:
    """Return the compiler flag for this machine, or for the architecture in DIPTYCH_MARCH."""
    named = os.environ.get("DIPTYCH_MARCH")
    if sys.platform == "darwin" and platform.machine() == "arm64" and not named:
        return "-mcpu=native"  # Apple's compiler does not support -march=native on arm64
    return f"-march={named or 'native'}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free


def _reason(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    return str(output).strip().splitlines()[0] if output else str(error)
