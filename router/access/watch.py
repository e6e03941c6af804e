"""Detects new content of files that are overwritten or replaced by a rename or a new symbolic link.

If the file system does not respond, the current content stays in force, and the process can still exit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common.machine import UnreadableFile, read_regular_file

MAX_BYTES = 8 * 1024 * 1024
"""Twice the largest file that is watched."""
STALL_S = 5.0
"""Maximum time between two parts of a watched file, in seconds."""


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
