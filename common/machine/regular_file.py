"""Reads files of unknown origin: regular files only, within a size and a time, whatever the folder does meanwhile.

A folder may hold a FIFO, a device or a symbolic link to either, and its file system may stop answering. A read of the
kernel cannot be interrupted, so each file is read on a daemon thread, which is abandoned when it makes no progress.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path

STALL_S = 30.0
"""Longest time between two parts of a file: a disk that is awake needs milliseconds."""
READ_S = 300.0
"""Longest time for a whole file."""
FILE_PART_BYTES = 1 << 20
MAX_ABANDONED = 8
"""Threads that may hang at a time. More reads are refused, so that a dead file system does not collect threads."""
PROGRESS_POLL_S = 0.05


class UnreadableFile(OSError):
    """A file that is not regular or too large, or whose file system does not answer. `strerror` has the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EINVAL, reason)


_slots = threading.BoundedSemaphore(MAX_ABANDONED)


class _Read:
    """One file on its thread. `num_parts` counts the system calls that returned."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self.ended = threading.Event()
        self.is_abandoned = False
        self.num_parts = 0
        self.data = bytearray()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.data = self._read()
        except Exception as error:  # the caller raises it
            self.error = error
        finally:
            _slots.release()
            self.ended.set()

    def _read(self) -> bytearray:
        self._check(os.stat(self._path))  # before the open: to open a device may change it
        # O_NONBLOCK: the file may have become a FIFO since, and to open one waits for a writer.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            data = bytearray(self._check(os.fstat(descriptor)))
            view, at = memoryview(data), 0
            while at < len(data) and not self.is_abandoned:
                num_read = file.readinto(view[at : at + FILE_PART_BYTES])
                if not num_read:
                    raise UnreadableFile(f"the file ends after {at:,} of {len(data):,} bytes")
                at += num_read
                self.num_parts += 1
        return data

    def _check(self, about: os.stat_result) -> int:
        """The number of bytes of a file that may be read."""
        self.num_parts += 1
        if not stat.S_ISREG(about.st_mode):
            raise UnreadableFile("it is not a regular file")
        if about.st_size > self._max_bytes:
            raise UnreadableFile(f"it has {about.st_size:,} bytes; at most {self._max_bytes:,} are read")
        return about.st_size


def read_regular_file(path: Path, max_bytes: int, *, stall_s: float = STALL_S, read_s: float = READ_S) -> bytearray:
    """The content of a regular file, or of one that a symbolic link names.

    Raises OSError, and UnreadableFile for another kind of file, one of more than `max_bytes`, one that makes no
    progress for `stall_s` seconds or is not complete after `read_s` seconds.
    """
    if not _slots.acquire(blocking=False):
        raise UnreadableFile(f"{MAX_ABANDONED} earlier reads still wait for their file systems")
    read = _Read(path, max_bytes)
    threading.Thread(target=read.run, name="read-file", daemon=True).start()
    began = moved = time.monotonic()
    num_parts = 0
    while not read.ended.wait(PROGRESS_POLL_S):
        now = time.monotonic()
        if read.num_parts != num_parts:
            num_parts, moved = read.num_parts, now
        if now - moved > stall_s or now - began > read_s:
            read.is_abandoned = True
            raise UnreadableFile(f"its file system made no progress for {now - moved:.0f} s, after {now - began:.0f} s")
    if read.error is not None:
        raise read.error
    return read.data
