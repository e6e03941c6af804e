"""Files of weights that this router received from clients, and their parts for workers that request them.

A file exists as long as the newest order names its weights, so that workers that join or restart can get it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

from common.errors import RETRY_AFTER_S, InvalidRequest, Unavailable
from common.machine import PrivateFolder, write_failure
from common.model_files import MAX_HEAD_BYTES, ReceivedWeights
from common.wire.messages import WEIGHTS_PART_BYTES, Message, WeightsPart, WeightsRequest

log = logging.getLogger(__name__)
WRITE_BYTES = 4 * 1024 * 1024
"""Received bytes in memory before they are written."""
MAX_PARTS = 2
"""Maximum number of parts in progress. Others wait, so that the event loop is never busy with parts for long."""
HEAD_LENGTH_BYTES = 8
"""Size of the header's length at the beginning of a safetensors file."""


class WeightsFiles:
    """Stores files in a temporary folder of this process. Used on the event loop; files are read on threads.

    `send(address, message)` sends a message to a worker. Each worker has at most one part in progress.
    """

    def __init__(self, send: Callable[[str, Message], bool]) -> None:
        self._send = send
        self._folder: PrivateFolder | None = None
        self._files: dict[str, ReceivedWeights] = {}
        self._parts: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_PARTS)

    async def receive(self, body: AsyncIterator[bytes], sha256: str) -> ReceivedWeights:
        """Store a file, whose expected SHA-256 is "" if unknown.

        Raises InvalidRequest for another file, Unavailable if the disk is full, and errors of `body`.
        """
        try:
            self._folder = self._folder or PrivateFolder("weights")
            new = self._folder.path / "received"
            try:
                with new.open("wb") as file:
                    digest, num_bytes = await _store(body, file)
                if sha256 and digest != sha256:
                    raise InvalidRequest(f"sha256: the body has {digest}, not {sha256}", param="sha256")
                weights = ReceivedWeights(digest, num_bytes, self._folder.path / f"{digest}.safetensors")
                new.rename(weights.path)
            finally:
                await asyncio.to_thread(new.unlink, missing_ok=True)
        except OSError as error:
            why = write_failure(self._folder.path if self._folder is not None else tempfile.gettempdir(), error)
            raise Unavailable(f"The router {why}.", retry_after_s=RETRY_AFTER_S) from error
        self._files[digest] = weights
        return weights

    async def keep(self, *weights: str) -> None:
        """Delete the files of all other weights; see `SetServing.weights`."""
        for sha256, received in list(self._files.items()):
            if str(received) not in weights:
                del self._files[sha256]
                await asyncio.to_thread(received.path.unlink, missing_ok=True)

    def on_request(self, address: str, request: WeightsRequest) -> None:
        """Send a part to a worker, unless this router does not have the file."""
        weights = self._files.get(request.sha256)
        if weights is not None and request.offset < weights.num_bytes and address not in self._parts:
            task = asyncio.create_task(self._answer(address, request, weights), name=f"weights for worker at {address}")
            self._parts[address] = task

    async def close(self) -> None:
        """Stop sending, and delete all files."""
        for task in list(self._parts.values()):
            task.cancel()
        await asyncio.gather(*self._parts.values(), return_exceptions=True)
        if self._folder is not None:
            await asyncio.to_thread(self._folder.close)

    async def _answer(self, address: str, request: WeightsRequest, weights: ReceivedWeights) -> None:
        try:
            async with self._slots:
                data = await asyncio.to_thread(_read, weights, request.offset)
        except OSError as error:
            log.error("weights at %s cannot be read: %s", weights.path, error.strerror)
            return
        finally:
            del self._parts[address]
        if data:  # the worker repeats requests whose part could not be sent
            self._send(address, WeightsPart(sha256=request.sha256, offset=request.offset, data=data))


async def _store(body: AsyncIterator[bytes], file: BinaryIO) -> tuple[str, int]:
    """Write a body. Returns its SHA-256 and size. Raises InvalidRequest unless it begins like a safetensors file."""
    began, digest, num_bytes = time.monotonic(), hashlib.sha256(), 0
    waiting: list[bytes] = []
    num_waiting, is_checked = 0, False

    def write() -> None:
        for part in waiting:
            digest.update(part)
            file.write(part)

    async for part in body:
        waiting.append(part)
        num_waiting += len(part)
        num_bytes += len(part)
        if not is_checked and num_bytes > HEAD_LENGTH_BYTES:
            _check_head(b"".join(waiting))
            is_checked = True
        if num_waiting >= WRITE_BYTES:
            await asyncio.to_thread(write)
            waiting, num_waiting = [], 0
    if not is_checked:
        raise InvalidRequest(f"The body has {num_bytes} bytes, and is not a safetensors file.")
    await asyncio.to_thread(write)
    await asyncio.to_thread(file.flush)
    log.info("received weights of %d bytes in %.1f s", num_bytes, time.monotonic() - began)
    return digest.hexdigest(), num_bytes


def _check_head(data: bytes) -> None:
    """Raise InvalidRequest unless a file begins with the length of its header, which workers parse, and the header."""
    length = int.from_bytes(data[:HEAD_LENGTH_BYTES], "little")
    if data[HEAD_LENGTH_BYTES : HEAD_LENGTH_BYTES + 1] != b"{" or length < 2:
        raise InvalidRequest("The body is not a safetensors file. Pickled tensors are never read.")
    if length > MAX_HEAD_BYTES:
        raise InvalidRequest(
            f"The header of the safetensors file has {length:,} bytes; the maximum is {MAX_HEAD_BYTES:,}."
        )


def _read(weights: ReceivedWeights, offset: int) -> bytes:
    descriptor = os.open(weights.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, WEIGHTS_PART_BYTES, offset)
    finally:
        os.close(descriptor)
