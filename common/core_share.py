"""Workers of one machine share its cores by turns: who computes alone takes them all, who has company takes a part.

While a worker has work it holds a lock on one byte of a file that all of them have open; before each step it counts
the locks. The kernel drops the locks of a process that dies. Two workers that each ran as many threads as there are
cores would wait for each other at every barrier (docs/performance.md). Results do not depend on the number of threads.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from types import TracebackType
from typing import Final

log = logging.getLogger(__name__)
FLOCK: Final = "hhqqi4x"  # struct flock: type, whence, start, length, pid
MAX_COUNTED: Final = 64


class CoreShare:
    """One worker's place in the file at `path`; "" for a worker that shares with nobody. Not for several threads."""

    def __init__(self, path: str, num_cores: int) -> None:
        self.num_cores = num_cores
        self._file = -1
        self._active = False
        if path and hasattr(fcntl, "F_OFD_SETLK"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def begin(self) -> int:
        """Say that this worker computes; how many threads its next step may use, at least one."""
        if self._file < 0:
            return self.num_cores
        try:
            if not self._active:
                self._lock(fcntl.F_WRLCK)
                self._active = True
            return max(1, self.num_cores // (1 + self._num_others()))
        except OSError as error:
            log.warning("cores are not shared any more: %s", error)
            self.close()
            return self.num_cores

    def end(self) -> None:
        """Say that this worker has nothing to compute."""
        if not self._active:
            return
        self._active = False
        try:
            self._lock(fcntl.F_UNLCK)
        except OSError:
            self.close()

    def close(self) -> None:
        """Leave for good; the lock goes with the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._active = -1, False

    def __enter__(self) -> CoreShare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, kind: int) -> None:
        """Of the byte that is this process's own. Locks may lie behind a file's end."""
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack(FLOCK, kind, os.SEEK_SET, os.getpid(), 1, 0))

    def _num_others(self) -> int:
        """Locks of others, from one to the next."""
        count, start = 0, 0
        while count < MAX_COUNTED:
            query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, 0, 0)
            answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, query)
            kind, _, found, length, _ = struct.unpack(FLOCK, answer)
            if kind == fcntl.F_UNLCK:
                return count
            count, start = count + 1, found + length
        return count
