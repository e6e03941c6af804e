"""Tells a full disk from other failures: it may have room again, so that a process waits instead of ending."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk, or of a user's share of it, that is full."""
FULL_BYTES = 256 * 1024
"""A disk with less room counts as full: SQLite takes 32 KiB at once for its index of a log."""


def is_full(folder: Path) -> bool:
    """Whether a file system has no room or no inode left for this process. False where that cannot be asked."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return False
    return about.f_bavail * about.f_frsize < FULL_BYTES or (about.f_files > 0 and about.f_favail == 0)
