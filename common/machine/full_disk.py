"""Detection of full disks, for processes that wait for free space instead of exiting."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of an exceeded quota."""
FULL_BYTES = 256 * 1024
"""Free space below which a disk counts as full: SQLite allocates 32 KiB at once for the index of its log."""


def is_full(folder: Path) -> bool:
    """Whether a file system has no space or no inode for this process. False if it cannot be queried."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return False
    return about.f_bavail * about.f_frsize < FULL_BYTES or (about.f_files > 0 and about.f_favail == 0)
