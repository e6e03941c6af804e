"""KV memory that a worker lets decode workers of the same host read: an anonymous, sealed memory file.

It has no name in any file system and lives as long as a process has it open or mapped: it is gone however that process
dies. Another process of the same user reaches it through /proc, and verifies by a nonce that it is the right one.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import sys

import numpy as np

from common.engine.kv.reached import Reached
from common.errors import DiptychError
from common.wire.messages import NONCE_BYTES, KVMemory

NAME = "diptych-kv"
_LINK = f"/memfd:{NAME} (deleted)"


class NotShared(DiptychError):
    """Memory cannot be shared with, or read from, another process. The message says why."""


class SharedMemory:
    """The owner's side: `.pages` is zero at first, mapped as it is touched, and has the nonce at its end."""

    def __init__(self, num_bytes: int) -> None:
        """Raises NotShared where the system has no such memory, OSError when there is no room."""
        if sys.platform != "linux":
            raise NotShared(f"{sys.platform} has no sealed memory files")
        import fcntl

        # The system makes a memory file of any size, but refuses a private mapping that it could never back.
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        try:
            self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as error:  # AttributeError: a libc that is older than the call
            raise NotShared(f"no memory file: {error}") from error
        try:
            os.fchmod(self._fd, stat.S_IRUSR | stat.S_IWUSR)
            os.ftruncate(self._fd, num_bytes + NONCE_BYTES)
            # If a file shrinks, its readers die of SIGBUS.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.pages = mmap.mmap(self._fd, num_bytes + NONCE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.pages[num_bytes:] = nonce
        self.offer = KVMemory(os.getpid(), self._fd, num_bytes, nonce)

    def __del__(self) -> None:
        if hasattr(self, "offer"):
            os.close(self._fd)


class PeerMemory:
    """The reader's side: another process's `SharedMemory`, mapped read-only until `close` or that process's death.

    `process` is a file descriptor that turns readable when the owner has died. The memory is the owner's cache, or a
    ring of places (`is_ring`), which the owner fills again once it hears that they were copied. `reached` has the
    places where this worker's device copies out of them itself.
    """

    def __init__(self, offer: KVMemory, *, is_ring: bool = False) -> None:
        """Raises NotShared unless what `offer` names is a sealed memory file of this user with the same nonce."""
        if sys.platform != "linux":
            raise NotShared(f"{sys.platform} has no sealed memory files")
        self.offer, self.is_ring = offer, is_ring
        self.reached: Reached | None = None
        try:
            # Before the file is opened: if the nonce is right then, the watched process is the one that offered it.
            self.process = os.pidfd_open(offer.pid)
        except (OSError, AttributeError) as error:
            raise NotShared(f"process {offer.pid} is not on this host, or hidden: {error}") from error
        try:
            self._blocks = _map(offer)
        except (OSError, ValueError) as error:
            os.close(self.process)
            raise NotShared(f"memory {offer.fd} of process {offer.pid} cannot be read: {error}") from error
        except NotShared:
            os.close(self.process)
            raise
        self.closed = False

    @property
    def address(self) -> int:
        """Where the memory is mapped."""
        return self._blocks.ctypes.data

    def read(self, source: int, target: memoryview) -> bool:
        """Copy block number `source`, as large as `target`, without holding the interpreter. False: no such block."""
        begin = source * len(target)
        if self.closed or begin + len(target) > self.offer.num_bytes:
            return False
        np.copyto(np.frombuffer(target, np.uint8), self._blocks[begin : begin + len(target)])
        return True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.process)
            if self.reached is not None:
                self.reached.close()
                self.reached = None
            self._blocks = np.empty(0, np.uint8)  # the last reference: unmapped now


def _map(offer: KVMemory) -> np.typing.NDArray[np.uint8]:
    """The blocks, read-only. Checks the link first: opening a file may have effects, reading a link has none."""
    assert sys.platform == "linux"
    import fcntl

    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    found = os.readlink(path)
    if found != _LINK:
        raise NotShared(f"{path} is {found!r}, not KV memory")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
            raise NotShared(f"{path} is not this user's alone")
        if status.st_size != offer.num_bytes + NONCE_BYTES:
            raise NotShared(f"{path} has {status.st_size} bytes, not {offer.num_bytes + NONCE_BYTES}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise NotShared(f"{path} could shrink")
        if os.pread(fd, NONCE_BYTES, offer.num_bytes) != offer.nonce:
            raise NotShared(f"{path} has another nonce: it is not the memory that was offered")
        return np.frombuffer(mmap.mmap(fd, offer.num_bytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)
