"""Weights in one memory file, as two processes see it: two views of it here, and real processes that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.machine import MemoryFile
from kernels.cpu import shared_weights
from kernels.cpu.shared_weights import WeightsFile

from ...waiting import wait_until

MEMORY = (
    "from kernels.cpu.shared_weights import WeightsFile; import sys, os, torch, time; file = WeightsFile(sys.argv[1])"
)
APPENDS = f"{MEMORY}; file.shared(torch.arange(100_000)); print('done', flush=True); time.sleep(300)"
HOLDS = f"{MEMORY}; turn = file._turn(); turn.__enter__(); print('holds', flush=True); time.sleep(300)"


@pytest.fixture
def file() -> MemoryFile:
    made = MemoryFile("diptych-test")
    return made if made.path else pytest.skip("this system has no memory files")


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(300, 1000, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_equal_weights_are_one_copy_and_others_are_not(file: MemoryFile) -> None:
    first, second = WeightsFile(file.path), WeightsFile(file.path)
    kept = [view.shared(weights(seed)) for view in (first, second) for seed in (1, 2, 3)]
    assert [torch.equal(one, weights(seed)) for one, seed in zip(kept, (1, 2, 3) * 2, strict=True)] == [True] * 6
    places = [one.data_ptr() - view._address for one, view in zip(kept, [first] * 3 + [second] * 3, strict=True)]
    assert places[:3] == places[3:] and len(set(places)) == 3
    assert kept[0].dtype == torch.bfloat16 and kept[0].shape == (300, 1000)
    assert os.stat(file.path).st_blocks * 512 < 3 * 2**20 + shared_weights.INDEX_BYTES


def test_what_cannot_be_shared_stays_as_it_is(file: MemoryFile, monkeypatch: pytest.MonkeyPatch) -> None:
    view = WeightsFile(file.path)
    for own in (torch.zeros(0), weights(1).T):
        assert view.shared(own) is own
    monkeypatch.setattr(shared_weights, "MAX_ENTRIES", 0)
    assert view.shared(own := weights(1)) is own
    monkeypatch.setattr("xxhash.xxh3_128_digest", lambda contents: bytes(16))
    monkeypatch.setattr(shared_weights, "MAX_ENTRIES", 9)
    assert view.shared(weights(1)).data_ptr() >= view._address
    assert view.shared(own := weights(2)) is own, "equal hashes, other contents"


def test_weights_after_the_first_model_are_shared_only_if_the_file_has_them(
    file: MemoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, unset in (("_file", None), ("_path", "")):
        monkeypatch.setattr(shared_weights, name, unset)
    monkeypatch.setattr(WeightsFile, "has_large_pages", lambda self: True)
    shared_weights.share_weights(file.path)
    first = shared_weights.shared(weights(1))
    assert shared_weights.is_sharing()
    shared_weights.share_weights(file.path)
    assert not shared_weights.is_sharing() and shared_weights.shared(own := weights(2)) is own
    assert shared_weights.shared(weights(1)).data_ptr() == first.data_ptr()


def test_large_pages_are_used_where_linux_has_them(file: MemoryFile) -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1) or "[deny]" in enabled.read_text():
        pytest.skip("this system has no large pages for shared memory")
    assert WeightsFile(file.path).has_large_pages()


def test_without_a_file_or_large_pages_weights_stay_private(
    file: MemoryFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(shared_weights, "_file", None)
    monkeypatch.setattr(WeightsFile, "has_large_pages", lambda self: False)
    for path in (file.path, "/nonexistent"):
        monkeypatch.setattr(shared_weights, "_path", "")
        shared_weights.share_weights(path)
    assert shared_weights.shared(own := weights(1)) is own
    assert "no large pages" in caplog.messages[0] and "No such file" in caplog.messages[1]


@pytest.mark.slow
def test_copies_outlive_the_process_that_made_them_and_its_lock_does_not(file: MemoryFile) -> None:
    for program, word in ((APPENDS, b"done\n"), (HOLDS, b"holds\n")):
        process = subprocess.Popen([sys.executable, "-P", "-c", program, file.path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == word
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    view = WeightsFile(file.path)
    with view._turn():
        (count,) = shared_weights.COUNT.unpack(os.pread(view._fd, 8, 0))
    assert count == 1 and torch.equal(view.shared(torch.arange(100_000)), torch.arange(100_000))


def test_nothing_remains_of_a_file_without_an_owner() -> None:
    path = Path(MemoryFile("diptych-test").path)
    wait_until(lambda: not path.exists() or "diptych-test" not in os.readlink(path))
