from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.engine.run.loaded import LoadedModel
from common.machine.cores import CoreShare
from kernels.cpu.backend import native_backend

HOLD = """
import sys
from common.machine.cores import CoreShare
share = CoreShare(sys.argv[1], 8)
share.begin(prompts=sys.argv[2:] == ["prompts"])
print("holds", flush=True)
sys.stdin.readline()
share.end()
print("released", flush=True)
sys.stdin.readline()
"""

ON_A_FULL_DISK = """
import resource, sys
from common.machine.cores import CoreShare
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
with CoreShare(sys.argv[1], 8) as share:
    print(share.begin(), share.view)
"""


class Holder:
    """Another process that computes until it is told to stop."""

    def __init__(self, path: Path, *what: str) -> None:
        command = [sys.executable, "-P", "-c", HOLD, str(path), *what]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.read("holds")

    def read(self, expected: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == expected

    def release(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.read("released")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def holders(path: Path) -> Iterator[list[Holder]]:
    made: list[Holder] = [Holder(path), Holder(path)]
    yield made
    for holder in made:
        holder.kill()


def test_alone_a_worker_has_all_cores(path: Path) -> None:
    with CoreShare(str(path), 8) as share:
        assert share.begin() == 8
        share.end()
        assert share.begin() == 8


def test_company_takes_its_part_until_it_is_idle_or_dead(path: Path, holders: list[Holder]) -> None:
    with CoreShare(str(path), 8) as share:
        assert share.begin() == 2  # 8 for three
        holders[0].release()
        assert share.begin() == 4
        holders[1].kill()
        assert share.begin() == 8


@pytest.mark.slow
def test_prompts_elsewhere_are_seen_until_they_are_computed_or_their_worker_dies(
    path: Path, holders: list[Holder]
) -> None:
    with CoreShare(str(path), 8) as share:
        assert not share.has_prompts_elsewhere, "two others compute, but no prompts alone"
        holders.append(Holder(path, "prompts"))
        assert share.has_prompts_elsewhere
        holders[-1].release()
        assert not share.has_prompts_elsewhere
        holders.append(Holder(path, "prompts"))
        assert share.has_prompts_elsewhere
        holders[-1].kill()
        assert not share.has_prompts_elsewhere
        share.begin(prompts=True)
        assert not share.has_prompts_elsewhere, "its own do not count"


def test_everyone_has_at_least_one_thread(path: Path, holders: list[Holder]) -> None:
    with CoreShare(str(path), 2) as share:
        assert share.begin() == 1
    assert len(holders) == 2


def test_without_a_file_nothing_is_shared() -> None:
    share = CoreShare("", 4)
    assert share.begin() == 4
    share.end()
    share.close()


def test_a_file_that_is_taken_away_does_no_harm(path: Path) -> None:
    share = CoreShare(str(path), 4)
    assert share.begin() == 4
    path.unlink()
    assert share.begin() == 4
    share.end()
    share.close()
    assert share.begin() == 4


def test_the_page_is_mapped_until_steps_use_another(path: Path) -> None:
    """The warm-up of other weights reads it after the engine has ended, and its `CoreShare` with it."""
    if native_backend() is None:
        pytest.skip("no C++ compiler here")

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    share = CoreShare(str(path), 4)
    LoadedModel.share_cores(share)
    share.close()
    del share
    assert is_mapped()
    LoadedModel.share_cores(CoreShare("", 0))
    assert not is_mapped()


def test_a_full_disk_is_shared_with_nobody(path: Path) -> None:
    command = [sys.executable, "-P", "-c", ON_A_FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "8 None\n"), done.stderr
