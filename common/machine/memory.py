"""How much memory a process may still take on this host: what the kernel has left, and what control groups allow.

Page cache of files counts as free, because the kernel drops it; free swap does, because others' pages can move there.

Also keeps glibc from giving large buffers back to the kernel after every frame. libzmq allocates memory for each
incoming KV frame. Frames are above malloc's default limit for mapped memory, so each would cost a system call and page
faults, about a third of the rate of transfers.
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
"""Freed memory at the heap's end that is kept for the next step, not given back and faulted in anew."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can still be taken, and in words what limits them."""

    num_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class _Names:
    """Files of a control group of one version, and what its `memory.stat` calls page cache and shared memory."""

    limit: str
    usage: str
    cache: str
    shared: str


VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
VERSION_2 = _Names("memory.max", "memory.current", "file", "shmem")


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> Available | None:
    """The least that any limit leaves; None on a system that tells nothing."""
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
    """The folders of this process's control groups and of all above them, whose limits hold as well."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            root, names = cgroups, VERSION_2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", VERSION_1
        else:
            continue
        own = root / path.lstrip("/")  # in a container it may name a folder of the host: then only the root is there
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder, names


def _swap(folder: Path) -> int:
    """Bytes that a group may still move to swap; 0 where it says nothing of it."""
    limit, used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
    return max(0, limit - used) if limit is not None and used is not None else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """What the file holds; None where it is missing or says "max"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """The lines `name number ...`."""
    fields = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdecimal()}


def keep_large_buffers() -> bool:
    """Reuse freed buffers of up to 32 MiB. False if the C library has no such setting."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
