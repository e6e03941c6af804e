"""Files of operators: read within bounds, parsed as TOML, and watched for new content.

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
"""Twice the largest file that is watched."""
STALL_S = 5.0
"""Maximum time between two parts of a watched file, in seconds."""


def content_of(field: str, path: str, max_bytes: int) -> bytes:
    """The bytes of a setting's file, which may be too long by one. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(field, path, f"a file that can be read ({error.strerror})") from error


def check_size(field: str, path: str, data: bytes, max_bytes: int) -> None:
    """Raises ConfigError for content that is too long."""
    if len(data) > max_bytes:
        raise ConfigError(field, path, f"a file of at most {max_bytes:,} bytes")


def table_of(field: str, path: str, data: bytes, max_bytes: int) -> dict[str, Any]:
    """What the content of a file says. Raises ConfigError for too long content, and for what is no TOML."""
    check_size(field, path, data, max_bytes)
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(field, path, f"a valid TOML file ({error})") from error


class FileWatch:
    """Watches files that belong together, from their content at its start on; one file from the `known` content on."""

    def __init__(self, paths: Sequence[str], known: bytes | None = None) -> None:
        self._paths = tuple(paths)
        self._known = self._seen = b""
        with suppress(UnreadableFile):  # an unreadable file counts as new once it can be read
            self._known = self._seen = self._digest()
        if known is not None:
            self._known = hashlib.blake2b(_framed(known)).digest()

    def look(self) -> bool:
        """Whether the content is new and the same as at the look before, because a file may be half written."""
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
