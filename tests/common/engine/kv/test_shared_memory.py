"""Memory of one process that another reads: the right one, or none at all."""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.kv.shared_memory import NAME, KVMemory, SharedMemory, SharedMemoryError
from common.engine.transfer.transports.shm import PeerMemory

from ....examples import examples

NUM_BYTES = 3 * 5000
OWNER = """
import sys, time
from common.engine.kv.shared_memory import SharedMemory
memory = SharedMemory(int(sys.argv[1]))
memory.pages[:4] = b"kept"
offer = memory.offer
print(offer.pid, offer.fd, offer.num_bytes, offer.nonce.hex(), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def files_of_other_tests_stay() -> Iterator[None]:
    """What tests before these left to the garbage collector is not closed while files are counted here."""
    gc.disable()
    yield
    gc.enable()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count(NAME)


def block(peer: PeerMemory, source: int, size: int = 5000) -> bytes | None:
    target = bytearray(size)
    return bytes(target) if peer.read(source, memoryview(target)) else None


@pytest.fixture
def memory() -> SharedMemory:
    memory = SharedMemory(NUM_BYTES)
    memory.pages[:NUM_BYTES] = b"".join(bytes([n]) * 5000 for n in (1, 2, 3))
    return memory


@pytest.fixture
def peer(memory: SharedMemory) -> Iterator[PeerMemory]:
    peer = PeerMemory(memory.offer)
    yield peer
    peer.close()


def test_blocks_are_what_the_owner_has_there_now(memory: SharedMemory, peer: PeerMemory) -> None:
    assert [block(peer, source) for source in range(3)] == [bytes([n]) * 5000 for n in (1, 2, 3)]
    memory.pages[5000] = 99
    assert block(peer, 1) == bytes([99]) + b"\2" * 4999


@pytest.mark.parametrize("source", [3, 2**62])
def test_there_is_nothing_behind_the_last_block(peer: PeerMemory, source: int) -> None:
    assert block(peer, source) is None
    assert block(peer, 0, NUM_BYTES) is not None and block(peer, 0, NUM_BYTES + 1) is None


def test_nothing_is_read_after_closing(memory: SharedMemory) -> None:
    files, maps = open_files(), mapped()
    peer = PeerMemory(memory.offer)
    assert mapped() == maps + 1
    for _ in range(2):
        peer.close()
    assert block(peer, 0) is None
    assert (open_files(), mapped()) == (files, maps)


def test_nobody_else_may_open_it_and_it_cannot_shrink(memory: SharedMemory) -> None:
    assert os.fstat(memory.offer.fd).st_mode & 0o777 == 0o600
    for size in (0, 2 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.offer.fd, size)


def test_it_outlives_its_owner_and_leaves_nothing_behind() -> None:
    files = open_files()
    command = [sys.executable, "-P", "-c", OWNER, str(NUM_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, fd, num_bytes, nonce = owner.stdout.readline().split()
        offer = KVMemory(int(pid), int(fd), int(num_bytes), bytes.fromhex(nonce))
        peer = PeerMemory(offer)
        assert os.stat(f"/proc/{pid}/fd/{fd}").st_nlink == 0  # no name in any file system
        assert not select.select([peer.process], [], [], 0)[0]
        owner.send_signal(signal.SIGKILL)
        assert select.select([peer.process], [], [], 20)[0]
    assert block(peer, 0, 4) == b"kept"
    peer.close()
    with pytest.raises(SharedMemoryError):
        PeerMemory(offer)
    assert open_files() == files


def unsealed(offer: KVMemory) -> KVMemory:
    fd = os.memfd_create(NAME)
    os.fchmod(fd, 0o600)
    os.pwrite(fd, offer.nonce, NUM_BYTES)
    return msgspec.structs.replace(offer, fd=fd)


def sealed(offer: KVMemory, *, mode: int = 0o600, name: str = NAME, size: int = NUM_BYTES) -> KVMemory:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.pwrite(fd, offer.nonce, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return msgspec.structs.replace(offer, fd=fd)


def other_file(offer: KVMemory, path: str) -> KVMemory:
    return msgspec.structs.replace(offer, fd=os.open(path, os.O_RDONLY | os.O_NONBLOCK))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda offer: msgspec.structs.replace(offer, pid=2**22 + 1), "not visible on this host"),
        (lambda offer: msgspec.structs.replace(offer, fd=9999), "No such file"),
        (lambda offer: msgspec.structs.replace(offer, nonce=b"x" * 16), "different nonce"),
        (lambda offer: msgspec.structs.replace(offer, num_bytes=NUM_BYTES - 1), "bytes instead of"),
        (lambda offer: msgspec.structs.replace(offer, num_bytes=2**50), "bytes instead of"),
        (unsealed, "not sealed against shrinking"),
        (lambda offer: sealed(offer, mode=0o644), "must be a regular file of this user"),
        (lambda offer: sealed(offer, name="other"), "not KV memory"),
        (lambda offer: sealed(offer, size=NUM_BYTES - 8), "bytes instead of"),
        (lambda offer: other_file(offer, "/dev/null"), "not KV memory"),
        (lambda offer: other_file(offer, "/proc/self/stat"), "not KV memory"),
        (lambda offer: other_file(offer, "/"), "not KV memory"),
    ],
)
def test_anything_else_is_refused_and_closed(
    memory: SharedMemory, spoil: Callable[[KVMemory], KVMemory], says: str
) -> None:
    offer = spoil(memory.offer)
    files, maps = open_files(), mapped()
    with pytest.raises(SharedMemoryError, match=says):
        PeerMemory(offer)
    assert (open_files(), mapped()) == (files, maps)
    if offer.fd not in (memory.offer.fd, 9999):
        os.close(offer.fd)


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(pid=st.integers(1, 2**31 - 1) | st.just(os.getpid()), fd=st.integers(0, 64), size=st.integers(1, 2**50))
def test_no_offer_at_random_is_taken(pid: int, fd: int, size: int) -> None:
    with pytest.raises(SharedMemoryError):
        PeerMemory(KVMemory(pid, fd, size, bytes(16)))


def test_no_room_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError)):
        SharedMemory(2**60)
