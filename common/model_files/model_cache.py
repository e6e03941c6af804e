"""Cache folders of models and conversions. Files are written under a lock and renamed when complete."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ModelError
from common.machine import NO_ROOM, write_failure

FULL_REMEDY = "Delete models with diptych rm, or set DIPTYCH_CACHE (Hugging Face models: HF_HOME) to a larger disk"


def cache_folder() -> Path:
    """Return `$DIPTYCH_CACHE`, or `~/.cache/diptych`. Built-in models are in models/, other conversions in local/."""
    chosen = os.environ.get("DIPTYCH_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "diptych"


def make_folder(folder: Path) -> Path:
    """Create `folder` and return it. Raises ModelError if the cache is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"the model cache {folder} cannot be created ({error.strerror}): set DIPTYCH_CACHE to a writable folder"
        ) from error
    return folder


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` atomically: readers see the old or the new content. Raises ModelError if the disk is full."""
    with explained_if_full(path, len(content)):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextmanager
def explained_if_full(path: Path, num_bytes: int = 0) -> Iterator[None]:
    """Turn the error of a full disk, while `num_bytes` are written to `path`, into a ModelError with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise ModelError(f"{write_failure(path, error, num_bytes)}. {FULL_REMEDY}") from error


@contextmanager
def locked(path: Path, *, waiting: str = "") -> Iterator[None]:
    """Hold an exclusive lock on the file `path` across processes. The lock is released if the process dies.

    Prints `waiting` to stderr if another process holds the lock. Raises ModelError if the file cannot be created.
    """
    make_folder(path.parent)
    try:
        file = path.open("a")
    except OSError as error:
        raise ModelError(
            f"the model cache {path.parent} is not writable ({error.strerror}): set DIPTYCH_CACHE to a writable folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
