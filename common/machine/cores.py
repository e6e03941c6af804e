"""Sharing of one machine's cores between workers: a worker that computes alone uses all, otherwise each uses a part.

Workers map a page with two bytes per worker: whether it computes, and whether it computes only prompts, for which
decode workers make space. Each worker holds a lock on its byte. The kernel releases the locks of a dead process, so
bytes without a lock are ignored. If two workers each ran one thread per core, they would wait for each other at every
barrier (docs/decisions/0007-shared-cores.md). Results do not depend on the number of threads.

Thread settings take effect only before torch is imported.
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
"""Same as in kernels/native/team.h, which reads that many bytes."""
IDLE, COMPUTING = b"\0", b"\1"
SPIN_COUNT = "2000"
"""Spin iterations of idle OpenMP threads. By default they spin for milliseconds and block the cores of other workers:
two workers on two cores then lose whole scheduler ticks (docs/decisions/0007-shared-cores.md)."""


class CoreShare:
    """One worker's slot in the file at `path`, for one thread. With path "" no cores are shared."""

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
    def view(self) -> ctypes.Array[ctypes.c_char] | None:
        """Bytes of all workers, which steps read while they run, mapped while referenced; None if nothing is shared."""
        return self._view

    def begin(self, *, prompts: bool = False) -> int:
        """Mark this worker as computing, possibly only `prompts`. Returns the number of threads for its next step."""
        if self._page is None:
            return self.num_cores
        try:
            self._page[NUM_PLACES + self._place] = prompts
            self._page[self._place : self._place + 1] = COMPUTING
            return max(1, self.num_cores // (1 + self._num_others()))
        except OSError as error:
            log.warning("core sharing: disabled: %s", error)
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
            return False  # logged by `begin`

    def end(self) -> None:
        """Mark this worker as idle."""
        if self._page is not None:
            self._page[self._place : self._place + 1] = IDLE

    def close(self) -> None:
        """Leave permanently. The lock is released with the file."""
        self.end()
        self._page = None  # `view` stays mapped while referenced
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
        """Take the first free slot."""
        try:
            os.posix_fallocate(self._file, 0, 2 * NUM_PLACES)  # otherwise writes raise SIGBUS when the disk is full
        except OSError as error:
            log.warning("core sharing: disabled: %s", error)
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
            self.end()  # the previous worker of this slot may have died while computing
            return
        log.warning("core sharing: disabled: all %d slots are in use", NUM_PLACES)
        os.close(self._file)
        self._file = -1

    def _num_others(self, offset: int = 0) -> int:
        """Return how many other workers compute, or with `NUM_PLACES` how many compute only prompts.

        Clears the bytes of workers that died while computing.
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
        """Take or query the lock of a slot. Returns the lock's type. Raises BlockingIOError if it is held."""
        query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        return int(struct.unpack(FLOCK, fcntl.fcntl(self._file, action, query))[0])


def pin_to_cores(cores: str) -> None:
    """Restrict this process to the configured cores."""
    wanted = parse_cores(cores)
    if wanted and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, wanted)


def spin_briefly() -> None:
    """Make idle OpenMP threads sleep soon, unless configured otherwise by the environment."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
