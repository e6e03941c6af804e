"""Identity of one of the processes that share a router's port, and the files that they agree on.

A configuration file may become invalid while the processes run. A process that restarts must then not read it, because
it would fail, or serve something different from the others. It reads the copy that was last agreed on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from common.config import RouterConfig
from common.machine import FOLDER_LOCK

NOT_OWNED = HTTPStatus.MISDIRECTED_REQUEST
"""Status with which a process responds to another one if it does not own the requested object."""
OWNER = "x-owner"
"""Header with the name of the API key on whose behalf another process asks."""
DIVIDED = ("max_inflight", "max_connections", "max_background", "batch_concurrency")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterPart:
    """Process number `index` of `count`. `folder` is shared by these processes only."""

    index: int
    count: int
    folder: Path

    def socket_of(self, index: int) -> Path:
        """Return the Unix socket of a process for requests of the others."""
        return self.folder / f"{index}.sock"

    @property
    def own_socket(self) -> Path:
        return self.socket_of(self.index)

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(index for index in range(self.count) if index != self.index)

    @property
    def began_at(self) -> int:
        """Start time of the router, in seconds since 1970. Unchanged when a process restarts."""
        return int((self.folder / FOLDER_LOCK).stat().st_mtime)

    @property
    def memory_store(self) -> str:
        """Path of the response store that is deleted when the router ends."""
        return str(self.folder / "responses.sqlite3")

    def share_of(self, config: RouterConfig) -> RouterConfig:
        """Return the settings of this process, with its share of the limits, rounded up."""
        return dataclasses.replace(config, **{name: -(-getattr(config, name) // self.count) for name in DIVIDED})


class AgreedFile:
    """A copy of the last configuration that a process accepted, as `name` in the shared folder."""

    def __init__(self, part: RouterPart, name: str) -> None:
        self._name = name
        self._path = part.folder / f"agreed-{name}"
        self._new = part.folder / f"agreed-{name}.{part.index}"

    def read(self) -> bytes | None:
        """Return the agreed content, or None if there is none. Raises OSError."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def agree(self, content: bytes) -> None:
        """Atomically replace the content for processes that start later. A failure is logged."""
        try:
            descriptor = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            self._new.rename(self._path)
        except OSError as error:
            log.error("cannot store %s: a router process that restarts will use an older one: %s", self._name, error)
