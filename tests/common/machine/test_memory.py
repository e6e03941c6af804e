"""What is left of a host's memory, by files like the kernel's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from common.machine.memory import host_memory, keep_large_buffers

Write = Callable[[str, str], None]
MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 500 kB\nSwapFree: 20 kB\nHugePages_Total: 0\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", MEMINFO)
    return write


def left(folder: Path) -> tuple[int, str]:
    found = host_memory(folder / "proc", folder / "cgroup")
    assert found is not None
    return found.num_bytes, found.limit.replace(str(folder), "")


def test_without_groups_it_is_what_the_kernel_says(tmp_path: Path, write: Write) -> None:
    assert left(tmp_path) == (520 * 1024, "MemAvailable and SwapFree of /proc/meminfo")


def test_a_group_of_version_2_less_its_use_without_page_cache(tmp_path: Path, write: Write) -> None:
    write("proc/self/cgroup", "0::/a/b\n")
    write("cgroup/a/b/memory.max", "max\n")
    write("cgroup/a/b/memory.current", "90000\n")
    write("cgroup/a/memory.max", "100000\n")
    write("cgroup/a/memory.current", "90000\n")
    write("cgroup/a/memory.stat", "anon 20000\nfile 60000\nshmem 10000\n")
    bytes_left, limit = left(tmp_path)
    assert bytes_left == 100_000 - (90_000 - 60_000 + 10_000)
    assert limit == "memory.max of 0.00 GiB in /cgroup/a, less its use"
    write("cgroup/a/memory.swap.max", "7000\n")
    write("cgroup/a/memory.swap.current", "4000\n")
    assert left(tmp_path)[0] == bytes_left + 3000


def test_a_group_of_version_1_that_only_the_host_sees_by_its_path(tmp_path: Path, write: Write) -> None:
    write("proc/self/cgroup", "5:cpu:/docker/x\n4:memory:/docker/x\n0::/\n")
    write("cgroup/memory/memory.limit_in_bytes", "200000\n")
    write("cgroup/memory/memory.usage_in_bytes", "150000\n")
    write("cgroup/memory/memory.stat", "cache 5\ntotal_cache 40000\ntotal_shmem 0\n")
    assert left(tmp_path) == (90_000, "memory.limit_in_bytes of 0.00 GiB in /cgroup/memory, less its use")


def test_a_limit_above_what_the_kernel_has_does_not_count(tmp_path: Path, write: Write) -> None:
    write("proc/self/cgroup", "4:memory:/\n")
    write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write("cgroup/memory/memory.usage_in_bytes", "150000\n")
    assert left(tmp_path)[0] == 520 * 1024


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert host_memory(tmp_path / "proc", tmp_path / "cgroup") is None


def test_it_says_whether_the_setting_took() -> None:
    assert keep_large_buffers() is hasattr(ctypes.CDLL(None), "mallopt")
