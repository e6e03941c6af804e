"""Weights that routers received from clients, on this worker: linked where the router stored them, or pulled from it.

WeightsRequest, to all routers ──> the router that has the file ──> WeightsPart
WeightsRequest, to this router ──> WeightsPart ... until the file is complete and its SHA-256 is right
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from common.engine.worker.control import ControlServer
from common.errors import ModelError
from common.machine import PrivateFolder, write_failure
from common.model_files import ReceivedWeights
from common.wire.messages import WeightsPart, WeightsRequest

log = logging.getLogger(__name__)
PROTOCOL = 13
"""First protocol version with `WeightsRequest`."""
PART_S = 5.0
"""Time, in seconds, after which a part is requested again, from all routers."""
MAX_SILENCE_S = 30.0
"""Maximum time, in seconds, without a part."""


class WeightsReceiver:
    """Finds or pulls one file at a time. Used on the event loop."""

    def __init__(self) -> None:
        self._folder: PrivateFolder | None = None
        self._paths: dict[str, Path] = {}
        self._awaited: tuple[WeightsRequest, asyncio.Future[tuple[bytes, bytes]]] | None = None

    async def fetch(self, weights: ReceivedWeights, control: ControlServer, check: Callable[[], None]) -> Path:
        """Return the path of verified weights on this host. `check` raises to end the wait.

        Raises ModelError if no router has them, they are damaged, or the disk is full.
        """
        path = self._paths.get(weights.sha256)
        if path is None or not path.exists():
            path = await asyncio.to_thread(self._link, weights) if await asyncio.to_thread(weights.is_here) else None
            if path is None:
                began = time.monotonic()
                path = await self._pull(weights, control, check)
                log.info("received weights: %d bytes in %.1f s", weights.num_bytes, time.monotonic() - began)
            self._paths[weights.sha256] = path
        return path

    def on_part(self, router: bytes, part: WeightsPart) -> None:
        """Process a message from a router. Ignores parts that are not awaited."""
        if self._awaited is not None:
            request, received = self._awaited
            if (part.sha256, part.offset) == (request.sha256, request.offset) and not received.done():
                received.set_result((router, part.data))

    async def keep(self, *weights: str) -> None:
        """Delete the files of all other weights."""
        kept = {received.sha256 for text in weights if (received := ReceivedWeights.parse(text)) is not None}
        for sha256, path in list(self._paths.items()):
            if sha256 not in kept:
                del self._paths[sha256]
                if self._folder is not None and path.parent == self._folder.path:
                    await asyncio.to_thread(path.unlink, missing_ok=True)

    def close(self) -> None:
        """Delete all files."""
        if self._folder is not None:
            self._folder.close()

    def _link(self, weights: ReceivedWeights) -> Path:
        """Return a hard link to a file on this host, which outlives the router, or the path on another file system."""
        try:
            path = self._own_path(weights)
            path.unlink(missing_ok=True)
            os.link(weights.path, path)
        except OSError:
            return weights.path
        return path

    def _own_path(self, weights: ReceivedWeights) -> Path:
        """Return the path of weights in this worker's folder. Raises OSError."""
        self._folder = self._folder or PrivateFolder("weights")
        return self._folder.path / f"{weights.sha256}.safetensors"

    async def _pull(self, weights: ReceivedWeights, control: ControlServer, check: Callable[[], None]) -> Path:
        try:
            path = self._own_path(weights)
            try:
                with path.open("wb") as file:
                    await self._receive(weights, file, control, check)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            place = error.filename or tempfile.gettempdir()
            raise ModelError(write_failure(place, error, weights.num_bytes)) from error
        finally:
            self._awaited = None
        return path

    async def _receive(
        self, weights: ReceivedWeights, file: BinaryIO, control: ControlServer, check: Callable[[], None]
    ) -> None:
        digest, router, num_received = hashlib.sha256(), b"", 0
        pending = self._request(weights.sha256, 0, router, control)
        heard = time.monotonic()
        while num_received < weights.num_bytes:
            check()
            try:
                async with asyncio.timeout(PART_S):
                    router, data = await pending
            except TimeoutError:
                if time.monotonic() - heard > MAX_SILENCE_S:
                    raise ModelError(
                        f"no router sent weights {weights.sha256[:16]} for {MAX_SILENCE_S:g} s: the router that "
                        "received them has ended or is unreachable, repeat the update"
                    ) from None
                router = b""
                pending = self._request(weights.sha256, num_received, router, control)
                continue
            heard, num_received = time.monotonic(), num_received + len(data)
            if num_received < weights.num_bytes:  # the next part travels while this one is written
                pending = self._request(weights.sha256, num_received, router, control)
            await asyncio.to_thread(_append, file, digest, data)
        if num_received != weights.num_bytes or digest.hexdigest() != weights.sha256:
            raise ModelError(f"the received weights do not have SHA-256 {weights.sha256}: repeat the update")

    def _request(
        self, sha256: str, offset: int, router: bytes, control: ControlServer
    ) -> asyncio.Future[tuple[bytes, bytes]]:
        """Request a part from a router, or from all if `router` is empty."""
        request, future = WeightsRequest(sha256=sha256, offset=offset), asyncio.get_running_loop().create_future()
        self._awaited = request, future
        if router:
            control.send(router, request)
        else:
            control.broadcast(request, PROTOCOL)
        return future


def _append(file: BinaryIO, digest: hashlib._Hash, data: bytes) -> None:
    digest.update(data)
    file.write(data)
