"""Notices new content of files, whether they were written over, renamed onto, or their symlink was swapped.

A file system that does not answer changes nothing: neither what is in force, nor that the process can end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common.machine.regular_file import UnreadableFile, read_regular_file

MAX_BYTES = 8 * 1024 * 1024
"""Twice the largest file that is watched."""
STALL_S = 5.0
"""Longest time between two parts of a file that is watched."""


class FileWatch:
    """Watches files that belong together, from their content at its start on; one file from the `known` content on."""

    def __init__(self, paths: Sequence[str], known: bytes | None = None) -> None:
        self._paths = tuple(paths)
        self._known = self._seen = b""
        with suppress(UnreadableFile):  # else it counts as new once it can be read
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
        """A digest of all contents, or of the error of a file that cannot be opened. Raises UnreadableFile."""
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
