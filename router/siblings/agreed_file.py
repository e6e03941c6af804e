"""The content of an operator's file by which all processes of a router go.

The file itself may change into something that they refuse while they run. A process that is started again then must not
read it: it would refuse to start, or would serve something else than the others.
"""

from __future__ import annotations

import logging
import os

from router.siblings.part import RouterPart

log = logging.getLogger(__name__)


class AgreedFile:
    """A copy of the last content that a process accepted, under a `name` in their folder."""

    def __init__(self, part: RouterPart, name: str) -> None:
        self._name = name
        self._path = part.folder / f"agreed-{name}"
        self._new = part.folder / f"agreed-{name}.{part.index}"

    def read(self) -> bytes | None:
        """The agreed content; None while there is none. Raises OSError."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def agree(self, content: bytes) -> None:
        """Have processes that are started from now on read this, all or nothing. A failure is logged."""
        try:
            descriptor = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            self._new.rename(self._path)
        except OSError as error:
            log.error("a process that is started again will read an older %s: %s", self._name, error)
