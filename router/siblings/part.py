"""One of the processes that share a router's port."""

from __future__ import annotations

import dataclasses
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
