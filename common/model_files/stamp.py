"""Detects changed or damaged files by sampling, and hashes whole files."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from common.errors import ModelError
from common.observe import ByteProgress

log = logging.getLogger(__name__)
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Number and size of the evenly spaced samples of a file."""
DIGEST_CHUNK_BYTES = 1 << 22
"""Bytes per read of a full hash, between updates of the progress bar."""
SLOW_BYTES = 1 << 31
"""Minimum size for a progress bar: hashing takes seconds."""


class FileStamp(msgspec.Struct, frozen=True):
    """Stamp of a file. Reads 64 KiB; detects replacement, truncation and most damage.

    `sample` is a hash over 16 pieces of 4 KiB spread over the file, including its first and last bytes.
    """

    path: str
    num_bytes: int
    mtime_ns: int
    sample: str


def stamp_files(paths: Sequence[Path]) -> tuple[FileStamp, ...]:
    """Stamp each file. Raises ModelError if one cannot be read."""
    return tuple(stamp_file(path) for path in paths)


def stamp_file(path: Path) -> FileStamp:
    """Stamp one file. Raises ModelError if it cannot be read."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            digest = xxhash.xxh3_64()
            last = max(about.st_size - SAMPLE_BYTES, 0)
            for i in range(SAMPLES):
                file.seek(last * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return FileStamp(str(path), about.st_size, about.st_mtime_ns, digest.hexdigest())


def hash_weights(paths: Sequence[Path], *, progress: bool, also: bytes = b"") -> str:
    """Hash the files in the given order, then `also`, into 16 hex digits that are equal on every machine.

    Without `progress`, writes log lines instead of a progress bar.
    """
    total = sum(path.stat().st_size for path in paths)
    digest = xxhash.xxh3_64()
    bar = None if progress and total >= SLOW_BYTES else False
    with ByteProgress("weights", "hashed", total, log, bar=bar) as shown:
        for path in paths:
            with path.open("rb") as file:
                while chunk := file.read(DIGEST_CHUNK_BYTES):
                    digest.update(chunk)
                    shown.add(len(chunk))
    digest.update(also)
    return digest.hexdigest()
