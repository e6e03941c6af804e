"""A memory file without a name, which the child processes of its owner open by its path in /proc."""

from __future__ import annotations

import os
import weakref


class MemoryFile:
    """As large as the machine's memory, but empty. It is freed when its owner and all who mapped it have ended."""

    def __init__(self, name: str) -> None:
        self.path = ""
        """Path for other processes of this user. Empty if the system has no memory files."""
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
        except (OSError, AttributeError):
            return
        weakref.finalize(self, os.close, fd)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
