"""Temporary folders for sockets and files of one process, which do not outlive it for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

FOLDER_LOCK = "lock"
"""File that the owner of a folder locks. It is as old as the folder."""
PREFIX = "diptych-"
MAX_PARENT_CHARS = 40
"""The path of a Unix socket is limited to about 100 characters, and vLLM's have names of 36."""

_open: set[PrivateFolder] = set()


class PrivateFolder:
    """A temporary folder that only this user can read. A context: it is removed at the end.

    A process that is killed leaves its folders. They are removed when another process creates or closes one.
    """

    def __init__(self, purpose: str) -> None:
        """`purpose` is part of the name. Raises OSError."""
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > MAX_PARENT_CHARS:
            parent = Path("/tmp")
        _remove_left(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent))
        new = self.path / f"{FOLDER_LOCK}.new"
        self._lock = new.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / FOLDER_LOCK)  # locked before other processes can find it
        _open.add(self)

    def close(self) -> None:
        """Remove the folder. Harmless if it was removed."""
        _open.discard(self)
        _remove(self.path)
        self._lock.close()
        _remove_left(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_private_folders() -> None:
    """Remove all folders of this process, which is about to exit without cleaning up."""
    for folder in list(_open):
        folder.close()


def _remove_left(parent: Path) -> None:
    """Remove the folders of killed processes."""
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or removed by another process
            _remove_if_left(left)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of this user that no process has locked. Anyone may create files with its name.

    Raises OSError if it is in use.
    """
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return
    # O_NONBLOCK: opening a FIFO waits for a writer.
    descriptor = os.open(folder / FOLDER_LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as lock:
        if stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder and, at the end, its lock, so that another process can continue if this one exits."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.name == FOLDER_LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
