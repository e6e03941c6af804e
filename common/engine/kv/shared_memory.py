"""KV memory shared with decode workers of the same host: an anonymous, sealed memory file.

It has no name in any file system and is freed when the last process that opened or mapped it ends. Another process of
the same user opens it through /proc and verifies a nonce.
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
"""Length of the random nonce after the blocks, which proves that a process mapped the memory that was offered."""
_LINK = f"/memfd:{NAME} (deleted)"


class KVMemory(msgspec.Struct, frozen=True, array_like=True):
    """Offer of KV memory to processes of the same host: file descriptor `fd` of process `pid`.

    The memory contains `num_bytes` of blocks, or of ring slots (`is_ring`), followed by the secret `nonce`. A reader
    must find the same nonce there before it trusts the memory. `slot_bytes` is the distance between slots, which may
    contain shorter blocks; 0 is the size of a block.
    """

    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    fd: Annotated[int, Meta(ge=0, lt=2**31)]
    num_bytes: Annotated[int, Meta(ge=1, le=2**50)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    is_ring: bool = False
    slot_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0


class SharedMemoryError(DiptychError):
    """Memory cannot be shared with, or mapped from, another process. The message gives the reason."""


class SharedMemory:
    """Owner side: `.pages` is initially zero, mapped on first touch, and ends with the nonce."""

    def __init__(self, num_bytes: int, *, is_ring: bool = False, slot_bytes: int = 0) -> None:
        """`is_ring`: the memory contains ring slots, at a distance of `slot_bytes`, instead of a whole cache.

        Raises SharedMemoryError if the system does not support memory files, OSError if memory is insufficient.
        """
        if sys.platform != "linux":
            raise SharedMemoryError(f"{sys.platform} does not support sealed memory files")
        import fcntl

        # Memory files of any size can be created, but a private mapping that the system cannot back fails.
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        try:
            self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as error:  # AttributeError: libc is too old
            raise SharedMemoryError(f"cannot create a memory file: {error}") from error
        try:
            os.fchmod(self._fd, stat.S_IRUSR | stat.S_IWUSR)
            os.ftruncate(self._fd, num_bytes + NONCE_BYTES)
            # Readers of a file that shrinks would die of SIGBUS.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.pages = mmap.mmap(self._fd, num_bytes + NONCE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.pages[num_bytes:] = nonce
        self.offer = KVMemory(os.getpid(), self._fd, num_bytes, nonce, is_ring, slot_bytes)

    def __del__(self) -> None:
        if hasattr(self, "offer"):
            os.close(self._fd)


def map_shared(offer: KVMemory) -> np.typing.NDArray[np.uint8]:
    """Map another process's `SharedMemory` read-only, without the nonce, until the last reference to the array ends.

    Raises SharedMemoryError unless `offer` names a sealed memory file of this user with the same nonce, OSError or
    ValueError if it cannot be read.
    """
    assert sys.platform == "linux"
    import fcntl

    # Check the link first: opening an arbitrary file may have side effects.
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    found = os.readlink(path)
    if found != _LINK:
        raise SharedMemoryError(f"{path} is {found!r}, not KV memory")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
            raise SharedMemoryError(f"{path} must be a regular file of this user with mode 0600")
        if status.st_size != offer.num_bytes + NONCE_BYTES:
            raise SharedMemoryError(f"{path} has {status.st_size} bytes instead of {offer.num_bytes + NONCE_BYTES}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise SharedMemoryError(f"{path} is not sealed against shrinking")
        if os.pread(fd, NONCE_BYTES, offer.num_bytes) != offer.nonce:
            raise SharedMemoryError(f"{path} has a different nonce: it is not the memory that was offered")
        return np.frombuffer(mmap.mmap(fd, offer.num_bytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)
