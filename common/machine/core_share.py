"""Workers of one machine share its cores by turns: who computes alone takes them all, who has company takes a part.

They map one page, a byte for each of them: 1 while it has work. A worker holds a lock on its byte for as long as it
lives, and the kernel drops the locks of a process that dies, so a byte without a lock counts for nothing. Two workers
that each ran as many threads as there are cores would wait for each other at every barrier (docs/performance.md).
Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
from types import TracebackType
from typing import Final

log = logging.getLogger(__name__)
FLOCK: Final = "hhqqi4x"  # struct flock: type, whence, start, length, pid
NUM_PLACES: Final = 64
"""As in kernels/native/team.h."""
IDLE, COMPUTING = b"\0", b"\1"


class CoreShare:
    """One worker's place in the file at `path`; "" for a worker that shares with nobody. Not for several threads."""

    def __init__(self, path: str, num_cores: int) -> None:
        self.num_cores = num_cores
        self._file = -1
        self._place = -1
        self._page: mmap.mmap | None = None
        self._view: ctypes.Array[ctypes.c_char] | None = None
        if path and hasattr(fcntl, "F_OFD_SETLK"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._join()

    @property
    def address(self) -> int:
        """Of the bytes, for steps that ask while they run; 0 where nothing is shared."""
        return 0 if self._view is None else ctypes.addressof(self._view)

    def begin(self) -> int:
        """Say that this worker computes; how many threads its next step may use, at least one."""
        if self._page is None:
            return self.num_cores
        try:
            self._page[self._place : self._place + 1] = COMPUTING
            return max(1, self.num_cores // (1 + self._num_others()))
        except OSError as error:
            log.warning("cores are not shared any more: %s", error)
            self.close()
            return self.num_cores

    def end(self) -> None:
        """Say that this worker has nothing to compute."""
        if self._page is not None:
            self._page[self._place : self._place + 1] = IDLE

    def close(self) -> None:
        """Leave for good; the lock goes with the file."""
        self.end()
        self._page = None  # what `address` names stays mapped as long as this object lives
        if self._file >= 0:
            os.close(self._file)
        self._file = self._place = -1

    def __enter__(self) -> CoreShare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self) -> None:
        """Take the first place that nobody holds."""
        try:
            os.posix_fallocate(self._file, 0, NUM_PLACES)  # to write to a page that a full disk cannot keep is a SIGBUS
        except OSError as error:
            log.warning("cores are not shared: %s", error)
            os.close(self._file)
            self._file = -1
            return
        for place in range(NUM_PLACES):
            try:
                self._lock(fcntl.F_OFD_SETLK, place)
            except BlockingIOError:
                continue
            self._place = place
            self._page = mmap.mmap(self._file, NUM_PLACES)
            self._view = (ctypes.c_char * NUM_PLACES).from_buffer(self._page)
            self.end()  # whoever had the place before may have died at work
            return
        log.warning("cores are not shared: all %d places are taken", NUM_PLACES)
        os.close(self._file)
        self._file = -1

    def _num_others(self) -> int:
        """How many of the others compute. Forgets those that died at work."""
        assert self._page is not None
        places = self._page[:]
        count = 0
        for place in range(NUM_PLACES):
            if place == self._place or places[place : place + 1] == IDLE:
                continue
            if self._lock(fcntl.F_OFD_GETLK, place) == fcntl.F_UNLCK:
                self._page[place : place + 1] = IDLE
            else:
                count += 1
        return count

    def _lock(self, action: int, place: int) -> int:
        """Ask for the lock of a place, or who has it: the type that is found. BlockingIOError where it is taken."""
        query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        return int(struct.unpack(FLOCK, fcntl.fcntl(self._file, action, query))[0])
