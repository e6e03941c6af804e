"""Reads untrusted files: regular files only, with bounds on size and time.

A folder may contain a FIFO, a device or a symbolic link to either, and its file system may stop responding. A blocked
read cannot be interrupted, so each file is read on a daemon thread, which is abandoned if it makes no progress.

Also the limit of open files, and detection of full disks, for processes that wait for free space instead of exiting.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

STALL_S = 30.0
"""Maximum time between two parts of a file, in seconds. A disk that is spinning needs milliseconds."""
READ_S = 300.0
"""Maximum time for a whole file, in seconds."""
FILE_PART_BYTES = 1 << 20
MAX_ABANDONED = 8
"""Maximum number of blocked threads. Further reads are refused, so that a dead file system does not exhaust threads."""
PROGRESS_POLL_S = 0.05
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of an exceeded quota."""
FULL_BYTES = 256 * 1024
"""Free space below which a disk counts as full: SQLite allocates 32 KiB at once for the index of its log."""
ENOUGH = 65_536
"""Number of descriptors for several times the connections of all clients and workers."""


class UnreadableFile(OSError):
    """The file is not regular or too large, or its file system does not respond. `strerror` has the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EINVAL, reason)


_slots = threading.BoundedSemaphore(MAX_ABANDONED)


class _Read:
    """The read of one file on its thread. `num_parts` counts the system calls that returned."""

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
        self._check(os.stat(self._path))  # before the open, because opening a device may change it
        # O_NONBLOCK: the file may be a FIFO by now, and opening a FIFO waits for a writer.
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
        """Return the number of bytes to read."""
        self.num_parts += 1
        if not stat.S_ISREG(about.st_mode):
            raise UnreadableFile("it is not a regular file")
        if about.st_size > self._max_bytes:
            raise UnreadableFile(f"it has {about.st_size:,} bytes; the maximum is {self._max_bytes:,}")
        return about.st_size


def read_regular_file(path: Path, max_bytes: int, *, stall_s: float = STALL_S, read_s: float = READ_S) -> bytearray:
    """Read a regular file. Follows symbolic links.

    Raises OSError, and UnreadableFile for other kinds of files, files of more than `max_bytes`, and reads that make no
    progress for `stall_s` seconds or do not complete within `read_s` seconds.
    """
    if not _slots.acquire(blocking=False):
        raise UnreadableFile(f"{MAX_ABANDONED} earlier reads are still blocked by their file systems")
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
            raise UnreadableFile(f"no progress for {now - moved:.0f} s, {now - began:.0f} s after the read began")
    if read.error is not None:
        raise read.error
    return read.data


def is_full(folder: Path) -> bool:
    """Whether a file system has no space or no inode for this process. False if it cannot be queried."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return False
    return about.f_bavail * about.f_frsize < FULL_BYTES or (about.f_files > 0 and about.f_favail == 0)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest of its folders that exists. Raises OSError for a folder without access."""
    whole = path.absolute()
    return next(one for one in (whole, *whole.parents) if one.exists())


def write_failure(path: Path | str, error: OSError, needed: int = 0) -> str:
    """Describe why `path` could not be written; for a full disk with the needed (0: unknown) and the free bytes."""
    if error.errno not in NO_ROOM:
        return f"cannot write {path}: {error.strerror or error}"
    what = "the disk quota is exceeded" if error.errno == errno.EDQUOT else "no space is left on the disk"
    sizes = [f"{needed:,} bytes are needed"] if needed else []
    with suppress(OSError):
        about = os.statvfs(nearest_existing(Path(path)))
        sizes.append(f"{about.f_bavail * about.f_frsize:,} bytes are free")
        if about.f_files and not about.f_favail:
            sizes.append("no inode is free")
    details = f" ({', '.join(sizes)})" if sizes else ""
    return f"cannot write {path}: {what}{details}"


def raise_file_limit() -> None:
    """Raise the limit of open files up to the system's limit or `ENOUGH`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
