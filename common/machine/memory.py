"""Memory available to a process on this host, from the kernel and control groups.

Page cache counts as available, because the kernel drops it. So does free swap, to which pages of other processes can
move.

Also configures glibc not to return large buffers to the kernel after every frame. libzmq allocates memory for each
incoming KV frame. Frames exceed malloc's default threshold for mmap, so each would cost a system call and page faults,
about a third of the transfer rate.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024  # the largest that glibc accepts
TRIM_THRESHOLD_BYTES = 256 * 1024 * 1024
"""Amount of freed memory at the end of the heap that is kept for reuse."""


@dataclass(frozen=True, slots=True)
class Available:
    """Available bytes, and a description of the limiting factor."""

    num_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class _Names:
    """File names of a control group version, and the names of page cache and shared memory in its `memory.stat`."""

    limit: str
    usage: str
    cache: str
    shared: str


VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
VERSION_2 = _Names("memory.max", "memory.current", "file", "shmem")


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> Available | None:
    """Return the lowest available memory over all limits; None if unknown."""
    of_kernel = _numbers(proc / "meminfo")
    if "MemAvailable:" not in of_kernel:
        return None
    swap = of_kernel.get("SwapFree:", 0) * 1024
    found = [Available(of_kernel["MemAvailable:"] * 1024 + swap, "MemAvailable and SwapFree of /proc/meminfo")]
    for folder, names in _groups(proc, cgroups):
        limit, usage = _number(folder / names.limit), _number(folder / names.usage)
        if limit is not None and usage is not None:
            stat = _numbers(folder / "memory.stat")
            dropped = max(0, stat.get(names.cache, 0) - stat.get(names.shared, 0))
            left = limit - max(0, usage - dropped) + min(swap, _swap(folder))
            found.append(Available(max(0, left), f"{names.limit} of {limit / 2**30:.2f} GiB in {folder}, less its use"))
    return min(found, key=lambda one: one.num_bytes)


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """Iterate over the folders of this process's control groups and their parents, whose limits also apply."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            root, names = cgroups, VERSION_2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", VERSION_1
        else:
            continue
        own = root / path.lstrip("/")  # in a container the path may be that of the host; then only the root exists
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder, names


def _swap(folder: Path) -> int:
    """Return the bytes that a group may still swap; 0 if unknown."""
    limit, used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
    return max(0, limit - used) if limit is not None and used is not None else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Read a number; None if the file is missing or contains "max"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """Parse lines of the form `name number ...`."""
    fields = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdecimal()}


def keep_large_buffers() -> bool:
    """Reuse freed buffers of up to 32 MiB. Returns False if the C library does not support it."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
