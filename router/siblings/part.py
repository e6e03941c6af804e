"""One of the processes that share a router's port, and what they agree on.

An operator's file may change into something that the processes refuse while they run. A process that is started again
then must not read it: it would refuse to start, or would serve something else than the others. It reads the copy that
they agreed on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from common.config import RouterConfig

NOT_MINE = HTTPStatus.MISDIRECTED_REQUEST
"""What a process answers to another that asks for what it does not have."""
OWNER = "x-owner"
"""The header with the name of the API key for which another process asks."""
LOCK = "lock"
"""A file in their folder, which their parent makes first and keeps locked."""
DIVIDED = ("max_inflight", "max_connections", "max_background", "batch_concurrency")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterPart:
    """Number `index` of `count`. They meet in `folder`, which is theirs alone."""

    index: int
    count: int
    folder: Path

    def socket_of(self, index: int) -> Path:
        """Where a process answers the others."""
        return self.folder / f"{index}.sock"

    @property
    def own_socket(self) -> Path:
        return self.socket_of(self.index)

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(index for index in range(self.count) if index != self.index)

    @property
    def began_at(self) -> int:
        """When the router began, in seconds since 1970: the same for a process that was started again."""
        return int((self.folder / LOCK).stat().st_mtime)

    @property
    def memory_store(self) -> str:
        """The file of responses that are to be kept only until the router ends."""
        return str(self.folder / "responses.sqlite3")

    def share_of(self, config: RouterConfig) -> RouterConfig:
        """The settings of this process: together they take what one would, rounded up."""
        return dataclasses.replace(config, **{name: -(-getattr(config, name) // self.count) for name in DIVIDED})


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
