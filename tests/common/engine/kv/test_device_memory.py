"""Memory of GPUs that processes share: what the driver is asked for, who may have it, and when it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.kv.cache import KVCache
from common.engine.kv.cuda_driver import CudaDriver, DriverError, driver
from common.engine.kv.device_memory import (
    DescriptorError,
    DescriptorServer,
    ExportedMemory,
    KVDevice,
    receive_descriptor,
)
from common.engine.transfer.transports.cuda_ipc import ImportedMemory
from common.engine.transfer.transports.registry import new_transport
from common.errors import ConfigError, ModelError
from common.model_files.config import from_hf
from common.model_files.resolve import resolve_model

from .... import pretended_cuda
from ....waiting import wait_until

PAGE = 65536
OTHERS: set[str] = set()
OWNER = """
import sys, numpy as np
from tests import pretended_cuda
pretended_cuda.use()
from common.engine.kv.device_memory import ExportedMemory
memory = ExportedMemory(100_000, 0)
np.asarray(memory.map)[:] = 7
print(memory.offer.pid, memory.offer.name, memory.offer.num_bytes, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_cuda.pretended(monkeypatch):
        OTHERS.clear()
        OTHERS.update(maps())
        yield


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], KVDevice]]:
    """Another process with memory that is full of sevens."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root()
    )
    assert process.stdout is not None
    pid, name, num_bytes = process.stdout.readline().split()
    yield process, KVDevice(int(pid), name, int(num_bytes))
    process.kill()
    process.communicate()


def root() -> Path:
    return Path(__file__).parents[3]


def opened(offer: KVDevice) -> ImportedMemory:
    memory = ImportedMemory(offer, 0)
    memory.reached = Nothing()
    return memory


class Nothing:
    block_bytes = 1

    def copy(self, copies: object) -> Iterator[int | None]:
        raise AssertionError("nothing is copied here")

    def close(self) -> None: ...


def maps() -> list[str]:
    """Of this test: what others of this process still hold does not count."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "pretended-gpu" in line and line not in OTHERS]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_another_process_reads_what_its_owner_wrote(owner: tuple[subprocess.Popen[str], KVDevice]) -> None:
    _, offer = owner
    assert offer.num_bytes == 2 * PAGE
    files = num_files()
    memory = opened(offer)
    (found,) = maps()
    assert found.split()[1] == "r--s"  # the owner alone may write
    assert (np.asarray(memory._map) == 7).all() and memory.address == memory._map.address
    assert num_files() == files + 1  # the owner's, to see it die: the memory's own is closed
    memory.close()
    memory.close()
    assert not maps() and num_files() == files


def test_memory_outlives_its_owner(owner: tuple[subprocess.Popen[str], KVDevice]) -> None:
    process, offer = owner
    memory = opened(offer)
    process.kill()
    process.wait()
    assert (np.asarray(memory._map) == 7).all()
    memory.close()
    with pytest.raises(DescriptorError, match="not visible on this host"):
        ImportedMemory(offer, 0)


def test_a_frozen_owner_is_waited_for_only_briefly(
    owner: tuple[subprocess.Popen[str], KVDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, offer = owner
    monkeypatch.setattr("common.engine.kv.device_memory.WAIT_S", 0.1)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text())
    files = num_files()
    with pytest.raises(DescriptorError, match="cannot receive the memory descriptor"):
        ImportedMemory(offer, 0)
    process.send_signal(signal.SIGCONT)
    assert num_files() == files and not maps()


def test_who_answers_must_be_the_process_that_offered(owner: tuple[subprocess.Popen[str], KVDevice]) -> None:
    _, offer = owner
    with pytest.raises(
        DescriptorError, match=f"process {offer.pid} of user .* answered instead of process {os.getpid()}"
    ):
        receive_descriptor(offer.name, os.getpid())
    with pytest.raises(DescriptorError, match="refused"):
        receive_descriptor("diptych-kv-of-nobody", offer.pid)


def test_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    given = DescriptorServer(read)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with socket.socket(socket.AF_UNIX) as asking:  # the kernel says who asks
        asking.settimeout(10)
        asking.connect(b"\0" + given.name.encode())
        assert socket.recv_fds(asking, 1, 1)[1] == []
    monkeypatch.undo()
    given.close()
    assert "did not share GPU memory" in caplog.text and f"belongs to user {mine}" in caplog.text
    os.close(write)


def test_a_giver_without_a_free_descriptor_gives_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("common.engine.kv.device_memory.WAIT_S", 0.05)
    read, write = os.pipe()
    given = DescriptorServer(read)
    left, accept = [OSError(24, "Too many open files")] * 2, socket.socket.accept

    def full(self: socket.socket) -> object:
        if left:
            raise left.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", full)
    deadline, taken = time.monotonic() + 30, -1
    while left or taken < 0:  # one more is accepted before the first failure
        with contextlib.suppress(DescriptorError):
            taken = receive_descriptor(given.name, os.getpid())
            os.close(taken)
        assert time.monotonic() < deadline
    given.close()
    os.close(write)
    assert caplog.text.count("for GPU memory: [Errno 24]") == 2


def test_what_was_given_is_a_descriptor_of_its_own_and_ends_with_close() -> None:
    read, write = os.pipe()
    given = DescriptorServer(read)
    taken = receive_descriptor(given.name, os.getpid())
    given.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    os.write(write, b"x")
    assert os.read(taken, 1) == b"x"
    with pytest.raises(DescriptorError):
        receive_descriptor(given.name, os.getpid())
    os.close(taken)
    os.close(write)


@pytest.mark.parametrize(
    "call",
    ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
     "cuMemExportToShareableHandle"],
)  # fmt: skip
def test_a_call_that_fails_names_itself_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    files = num_files()
    driver()
    monkeypatch.setenv("PRETENDED_CUDA_FAILS", call)
    with pytest.raises(DriverError, match=rf"{call}: pretended error \(801\)"):
        ExportedMemory(PAGE, 0)
    gc.collect()
    assert not maps() and num_files() == files


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_reader_whose_driver_refuses_leaves_nothing(
    owner: tuple[subprocess.Popen[str], KVDevice], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    files = num_files()
    driver()
    monkeypatch.setenv("PRETENDED_CUDA_FAILS", call)
    with pytest.raises(DriverError, match=call):
        ImportedMemory(owner[1], 0)
    assert not maps() and num_files() == files


def test_a_driver_without_maps_for_reading_alone(
    owner: tuple[subprocess.Popen[str], KVDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETENDED_CUDA_FAILS", "NO_READ_ONLY")
    memory = opened(owner[1])
    assert maps()[0].split()[1] == "rw-s"
    memory.close()


def test_an_offer_of_more_than_there_is(owner: tuple[subprocess.Popen[str], KVDevice]) -> None:
    _, offer = owner
    with pytest.raises(DriverError, match="cuMemMap"):
        ImportedMemory(KVDevice(offer.pid, offer.name, offer.num_bytes + PAGE), 0)
    assert not maps()


@pytest.fixture
def new_cache() -> Callable[[int], KVCache]:
    folder = resolve_model("tiny-random").weights[0].parent
    return lambda count: KVCache(from_hf(folder / "config.json"), count, 16, "float32", export=True)


def test_a_cache_in_exported_memory(new_cache: Callable[[int], KVCache]) -> None:
    kv = new_cache(5)
    assert kv.exported is not None and kv.shared is None
    assert kv.tensor.data_ptr() == kv.exported.map.address and not kv.tensor.any()
    kv.tensor[3] = 1.5
    memory = opened(kv.exported.offer)
    there = torch.from_numpy(np.asarray(memory._map)[: kv.tensor.nbytes]).view(torch.float32).view(kv.tensor.shape)
    assert torch.equal(there, kv.tensor)
    del there
    memory.close()
    kv.exported.close()
    assert len(maps()) == 1
    kept = kv.tensor
    del kv
    gc.collect()
    assert len(maps()) == 1 and kept[3].eq(1.5).all()  # as long as anything refers to it
    del kept
    gc.collect()
    assert not maps()


def test_a_cache_without_references_is_no_longer_offered(new_cache: Callable[[int], KVCache]) -> None:
    files, threads = num_files(), threading.active_count()
    kv = new_cache(5)
    assert kv.exported is not None
    offer = kv.exported.offer
    del kv
    gc.collect()
    assert (num_files(), threading.active_count(), maps()) == (files, threads, [])
    with pytest.raises(DescriptorError):
        receive_descriptor(offer.name, offer.pid)


def test_a_cache_that_does_not_fit(new_cache: Callable[[int], KVCache]) -> None:
    with pytest.raises(ModelError, match=r"cannot allocate a KV cache of .* \(cuMemCreate: out of memory"):
        new_cache(2**34)


def test_a_worker_is_refused_where_the_driver_exports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    new_transport("cuda-ipc", "d")
    monkeypatch.setenv("PRETENDED_CUDA_FAILS", "NO_EXPORT")
    with pytest.raises(ConfigError, match="kv_transport.*cannot export memory of cuda:0"):
        new_transport("cuda-ipc", "d")
    monkeypatch.setattr("common.engine.kv.cuda_driver.LIBRARY", "libcuda-of-nobody.so")
    driver.cache_clear()
    with pytest.raises(ConfigError, match="cannot load the CUDA driver"):
        new_transport("cuda-ipc", "d")


def test_the_driver_is_loaded_once() -> None:
    assert isinstance(driver(), CudaDriver) and driver() is driver()
