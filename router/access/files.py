"""Operator's files: read with a size limit, parsed as TOML, and watched for changes.

A watch detects files that are overwritten or replaced by a rename or a new symbolic link. If the file system does not
respond, the current content stays in force, and the process can still exit.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.machine import UnreadableFile, read_regular_file

MAX_BYTES = 8 * 1024 * 1024
"""Twice the size of the largest watched file."""
STALL_S = 5.0
"""Maximum time, in seconds, between two reads of a watched file."""


def content_of(field: str, path: str, max_bytes: int) -> bytes:
    """Read a setting's file, up to one byte more than `max_bytes`. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(field, path, f"a readable file ({error.strerror})") from error


def check_size(field: str, path: str, data: bytes, max_bytes: int) -> None:
    """Raise ConfigError if the content exceeds `max_bytes`."""
    if len(data) > max_bytes:
        raise ConfigError(field, path, f"a file of at most {max_bytes:,} bytes")


def table_of(field: str, path: str, data: bytes, max_bytes: int) -> dict[str, Any]:
    """Parse the content of a TOML file. Raises ConfigError if it is too long or invalid."""
    check_size(field, path, data, max_bytes)
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(field, path, f"a valid TOML file ({error})") from error


class FileWatch:
    """Detects changes of a set of files relative to their content at creation, or of one file relative to `known`."""

    def __init__(self, paths: Sequence[str], known: bytes | None = None) -> None:
        self._paths = tuple(paths)
        self._known = self._seen = b""
        with suppress(UnreadableFile):  # an unreadable file counts as new once it can be read
            self._known = self._seen = self._digest()
        if known is not None:
            self._known = hashlib.blake2b(_framed(known)).digest()

    def look(self) -> bool:
        """Whether the content has changed and equals that of the previous call (a file may be half written)."""
        try:
            found = self._digest()
        except UnreadableFile:
            return False
        settled, self._seen = found == self._seen, found
        if not settled or found == self._known:
            return False
        self._known = found
        return True

    def _digest(self) -> bytes:
        """Compute a digest of all contents, or of the error if a file cannot be opened. Raises UnreadableFile."""
        whole = hashlib.blake2b()
        for path in self._paths:
            try:
                content = bytes(read_regular_file(Path(path), MAX_BYTES, stall_s=STALL_S))
            except UnreadableFile:
                raise
            except OSError as error:
                content = repr(error.errno).encode()
            whole.update(_framed(content))
        return whole.digest()


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content
