"""File source: workers listed in a file that another program replaces, such as a supervisor or a script.

{"prefill": ["tcp://127.0.0.1:7001"], "decode": ["tcp://127.0.0.1:7002"], "leaving": ["tcp://127.0.0.1:7003"]}
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from common.wire import Role
from router.fleet.discovery import DiscoveryStatus, Endpoint, Publish

INTERVAL_S = 0.2
"""Polling interval in seconds. The file is small and local."""
MAX_BYTES = 1 << 20
"""Maximum size of the file: thousands of addresses."""


class _Listed(msgspec.Struct, forbid_unknown_fields=True):
    """Control addresses by role. Those in `leaving` get no new requests."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


class FileSource:
    """Publishes the workers in the file until cancelled. If the file cannot be read, the last ones stay."""

    def __init__(
        self,
        path: Path,
        publish: Publish,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        named: dict[str, Role] = {f"{path}:prefill": "prefill", f"{path}:decode": "decode"}
        self.status = DiscoveryStatus("file", named, clock())
        self._path, self._publish, self._interval_s, self._clock = path, publish, interval_s, clock

    async def run(self) -> None:
        """Poll the file and publish changes until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(self._interval_s)

    def read(self) -> None:
        """Read the file once. Blocks, because the file is small and local."""
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            listed = msgspec.json.decode(content, type=_Listed)
        except (OSError, msgspec.MsgspecError) as error:
            self.status.failed(f"{self._path}: {error}", self._clock())
            return
        by_role: dict[Role, tuple[str, ...]] = {"prefill": listed.prefill, "decode": listed.decode}
        endpoints = tuple(
            sorted(
                Endpoint(role, address, terminating=address in listed.leaving)
                for role, addresses in by_role.items()
                for address in set(addresses)
            )
        )
        if endpoints != self.status.endpoints:
            self.status.published(endpoints)
            self._publish(endpoints)
        self.status.synced(self._clock())
