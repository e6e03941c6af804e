"""Lets the workers of one machine share its cores: a worker that computes alone uses all, otherwise each uses a part.

They map one page with a byte for each worker: 1 while it has work, and behind these another one: 1 while that work is
prompts alone, for which decode workers make room. A worker holds a lock on its byte as long as it
lives, and the kernel drops the locks of a process that dies, so a byte without a lock does not count. Two workers that
each ran as many threads as there are cores would wait for each other at every barrier (docs/measurements.md).
Results do not depend on the number of threads.

Settings of compute threads take effect only before torch is imported.
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

from common.config import parse_cores

log = logging.getLogger(__name__)
FLOCK: Final = "hhqqi4x"  # struct flock: type, whence, start, length, pid
NUM_PLACES: Final = 64
"""As in kernels/native/team.h, which reads the first so many bytes."""
IDLE, COMPUTING = b"\0", b"\1"
SPIN_COUNT = "2000"
"""Rounds that an idle OpenMP thread spins before it sleeps. By default it spins for milliseconds, during which other
workers cannot use its core: two workers on two cores then miss whole scheduler ticks (docs/measurements.md)."""


class CoreShare:
    """One worker's place in the file at `path`, for one thread. With path "" the worker shares no cores."""

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
        """The address of the bytes, which steps read while they run; 0 if nothing is shared."""
        return 0 if self._view is None else ctypes.addressof(self._view)

    def begin(self, *, prompts: bool = False) -> int:
        """Mark this worker as computing, maybe only `prompts`; how many threads its next step may use, at least one."""
        if self._page is None:
            return self.num_cores
        try:
            self._page[NUM_PLACES + self._place] = prompts
            self._page[self._place : self._place + 1] = COMPUTING
            return max(1, self.num_cores // (1 + self._num_others()))
        except OSError as error:
            log.warning("cores are not shared any more: %s", error)
            self.close()
            return self.num_cores

    @property
    def has_prompts_elsewhere(self) -> bool:
        """Whether another worker computes prompts."""
        if self._page is None:
            return False
        try:
            return self._num_others(NUM_PLACES) > 0
        except OSError:
            return False  # `begin` says so, and leaves

    def end(self) -> None:
        """Mark this worker as idle."""
        if self._page is not None:
            self._page[self._place : self._place + 1] = IDLE

    def close(self) -> None:
        """Leave for good; the lock goes with the file."""
        self.end()
        self._page = None  # `address` stays mapped as long as this object lives
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
        """Take the first free place."""
        try:
            os.posix_fallocate(self._file, 0, 2 * NUM_PLACES)  # else writes end in a SIGBUS when the disk is full
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
            self._page = mmap.mmap(self._file, 2 * NUM_PLACES)
            self._view = (ctypes.c_char * NUM_PLACES).from_buffer(self._page)
            self.end()  # the place's former worker may have died while it computed
            return
        log.warning("cores are not shared: all %d places are taken", NUM_PLACES)
        os.close(self._file)
        self._file = -1

    def _num_others(self, offset: int = 0) -> int:
        """How many other workers compute, or with `NUM_PLACES` how many compute prompts alone.

        Clears the bytes of those that died while they computed.
        """
        assert self._page is not None
        computing, marked = self._page[:NUM_PLACES], self._page[offset : offset + NUM_PLACES]
        count = 0
        for place in range(NUM_PLACES):
            if place == self._place or not (computing[place] and marked[place]):
                continue
            if self._lock(fcntl.F_OFD_GETLK, place) == fcntl.F_UNLCK:
                self._page[place : place + 1] = IDLE
            else:
                count += 1
        return count

    def _lock(self, action: int, place: int) -> int:
        """Take the lock of a place, or query it: the lock's type. Raises BlockingIOError if it is taken."""
        query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        return int(struct.unpack(FLOCK, fcntl.fcntl(self._file, action, query))[0])


def pin_to_cores(cores: str) -> None:
    """Restrict this process to the configured cores."""
    wanted = parse_cores(cores)
    if wanted and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, wanted)


def spin_briefly() -> None:
    """Let idle OpenMP threads sleep soon, unless the environment says otherwise."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
