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
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from common.errors import DiptychError

NAME = "diptych-kv"
NONCE_BYTES = 16
"""Random bytes behind the blocks: a process that reads the same there has mapped the memory that was offered."""
_LINK = f"/memfd:{NAME} (deleted)"


class KVMemory(msgspec.Struct, frozen=True, array_like=True):
    """Where a process of the same host finds a worker's blocks, or places for them (`is_ring`): file descriptor `fd` of
    process `pid`.

    The memory holds `num_bytes` of blocks and then the secret `nonce`: a reader trusts the memory once it has read the
    same nonce there.
    """

    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    fd: Annotated[int, Meta(ge=0, lt=2**31)]
    num_bytes: Annotated[int, Meta(ge=1, le=2**50)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    is_ring: bool = False


class NotShared(DiptychError):
    """Memory cannot be shared with, or read from, another process. The message says why."""


class SharedMemory:
    """The owner's side: `.pages` is zero at first, mapped as it is touched, and has the nonce at its end."""

    def __init__(self, num_bytes: int, *, is_ring: bool = False) -> None:
        """`is_ring`: for places that blocks pass through, instead of a whole cache.

        Raises NotShared where the system has no such memory, OSError when there is no room.
        """
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
        self.offer = KVMemory(os.getpid(), self._fd, num_bytes, nonce, is_ring)

    def __del__(self) -> None:
        if hasattr(self, "offer"):
            os.close(self._fd)


def map_shared(offer: KVMemory) -> np.typing.NDArray[np.uint8]:
    """Map another process's `SharedMemory` read-only, without the nonce, until the last reference to the array ends.

    Raises NotShared unless `offer` names a sealed memory file of this user with the same nonce, OSError or ValueError
    when that cannot be read.
    """
    assert sys.platform == "linux"
    import fcntl

    # Checks the link first: opening a file may have effects, reading a link has none.
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
