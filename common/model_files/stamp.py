"""Notices a changed or damaged file without reading all of it, and hashes whole files."""

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
"""Places in a file, evenly far apart, whose bytes tell it from a changed one without reading it all."""
DIGEST_CHUNK_BYTES = 1 << 22
"""Read at a time for a whole digest, between two moves of the bar."""
SLOW_BYTES = 1 << 31
"""Digests of larger files take seconds, and show a bar."""


class FileStamp(msgspec.Struct, frozen=True):
    """The marks of a file: cheap to take (64 KiB read), enough to notice replacement, truncation and most damage.

    `sample` is a hash over 16 pieces of 4 KiB spread over the file, its first and last bytes included.
    """

    path: str
    num_bytes: int
    mtime_ns: int
    sample: str


def stamp_files(paths: Sequence[Path]) -> tuple[FileStamp, ...]:
    """Stamps each file. Raises ModelError when one cannot be read."""
    return tuple(stamp_file(path) for path in paths)


def stamp_file(path: Path) -> FileStamp:
    """Stamps one file. Raises ModelError when it cannot be read."""
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
    """Hashes the whole content of the files, in the given order, into 16 hex digits: the same on every machine.

    `also` is hashed behind them. Without `progress` there is no bar, and lines in the log in its place.
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
