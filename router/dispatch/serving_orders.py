"""Pauses the workers of a model, puts them to sleep, and changes their weights together. Used by the API endpoints.

An update is one transaction: all workers load the new weights, then all drain, then all exchange them. If a worker
fails or is late, all keep, or return to, the old ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from common.errors import RETRY_AFTER_S, DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from common.model_files import MAX_HEAD_BYTES
from common.wire.messages import ServingMode, SetServing
from router.fleet import SERVING_PROTOCOL, WorkerFleet

log = logging.getLogger(__name__)
PauseMode = Literal["abort", "wait", "keep"]
STAGE_S = 600.0
"""Maximum time, in seconds, for all workers to load weights."""
DRAIN_S = 600.0
"""Maximum time, in seconds, for all running requests to end: the default deadline of a request."""
EXCHANGE_S = 120.0
"""Maximum time, in seconds, for all workers to exchange loaded weights, or to begin or end a pause."""
POLL_S = 0.02
"""Interval at which the state of an order is checked, in seconds."""
FIRST_WEIGHTS = "default"
"""Version of the weights with which workers were started, as in vLLM and SGLang."""


class ServingOrders:
    """Orders to the workers of one model. `abort_all` ends the running requests of this router."""

    def __init__(self, fleet: WorkerFleet, abort_all: Callable[[], None]) -> None:
        self._fleet, self._serving, self._abort_all = fleet, fleet.serving, abort_all
        self._is_busy = self._is_receiving = False

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait until `resume`."""
        return self._serving.is_paused

    @property
    def is_asleep(self) -> bool:
        """Whether the workers have freed their memory, or are about to."""
        return self._serving.mode == "sleep"

    @property
    def weight_version(self) -> str:
        """Version of the weights that answer new requests."""
        return self._serving.weight_version or FIRST_WEIGHTS

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing new requests: abort the running ones, wait for them, or keep them until `resume`.

        Raises RequestError. If requests still run after `DRAIN_S`, the pause stays in force.
        """
        async with self._alone():
            self._check_awake("pause")
            await self._set("hold" if mode == "keep" else "pause", DRAIN_S, aborts=mode == "abort")

    async def resume(self) -> None:
        """End a pause. Raises RequestError."""
        async with self._alone():
            self._check_awake("resume")
            await self._set("run", EXCHANGE_S)

    async def sleep(self, mode: PauseMode) -> None:
        """Free the memory of weights and KV cache on all workers, after the running requests were ended.

        Raises RequestError.
        """
        async with self._alone():
            if mode == "keep":
                raise InvalidRequest("mode: sleep frees the KV of requests: use 'abort' or 'wait'", param="mode")
            await self._set("sleep", DRAIN_S, aborts=mode == "abort")

    async def wake_up(self) -> None:
        """Load the model again on all workers. Raises RequestError."""
        async with self._alone():
            if self.is_asleep:
                await self._set("run", STAGE_S)

    async def update_from_body(
        self, body: Callable[[int], AsyncIterator[bytes]], sha256: str, weight_version: str, **options: bool
    ) -> int:
        """Change the weights to those of a safetensors file. Options, result and errors are those of `update`.

        `body(max_bytes)` returns the file. Its expected `sha256` is "" if unknown.
        """
        if self._is_receiving:
            raise InvalidRequest("This router already receives other weights of this model.")
        self._is_receiving, files = True, self._fleet.weights
        try:
            self._check_update()  # before the body is read
            received = await files.receive(body(self._most_bytes()), sha256)
            return await self.update(str(received), weight_version, **options, param="tensors")
        finally:
            self._is_receiving = False
            await files.keep(self._serving.newest.weights)

    async def update(
        self, path: str, weight_version: str, *, aborts: bool, keep_pause: bool, param: str = "model_path"
    ) -> int:
        """Change the weights of all workers to those in `path`. Returns the number of workers.

        Requests that run when all workers have loaded them end on the old weights, or are aborted. Later ones wait for
        the new weights. Raises RequestError, in which `param` is the name of `path`. All workers have the old weights
        then.
        """
        async with self._alone():
            before = self._check_update()
            number = self._next_version()
            staged = {"staged": path, "staged_number": number}
            changed = {"weights": path, "weights_number": number, "weight_version": weight_version or str(number)}
            end: ServingMode = "pause" if keep_pause or before.mode == "pause" else "run"
            try:
                await self._run(_next(before, number, **staged, lease_s=2 * STAGE_S), STAGE_S, param)
                drained = _next(
                    before, self._next_version(), mode="pause", aborts=aborts, **staged, lease_s=2 * DRAIN_S
                )
                await self._run(drained, DRAIN_S, "abort_all_requests")
                return await self._run(_next(before, self._next_version(), mode=end, **changed), EXCHANGE_S, param)
            except (RequestError, asyncio.CancelledError):
                self._send(_next(before, self._next_version()))  # workers execute it, even if the client has gone
                raise
            finally:
                await self._fleet.weights.keep(self._serving.newest.weights)

    # ------------------------------------------------------------ inside

    async def _set(self, mode: ServingMode, timeout_s: float, *, aborts: bool = False) -> None:
        """Set the mode of all workers. If a worker refuses, all return to the previous mode."""
        before = self._serving.newest
        self._check_workers()
        try:
            await self._run(_next(before, self._next_version(), mode=mode, aborts=aborts), timeout_s, "mode")
        except InvalidRequest:
            self._send(_next(before, self._next_version()))
            raise

    async def _run(self, order: SetServing, timeout_s: float, param: str) -> int:
        """Execute an order on all workers. Returns their number.

        Raises InvalidRequest with a worker's reason, DeadlineExceeded, Unavailable without workers.
        """
        self._send(order)
        if order.aborts:
            self._abort_all()
        deadline = time.monotonic() + timeout_s
        while (outcome := self._serving.outcome(order)).missing and time.monotonic() < deadline:
            if outcome.superseded:
                break
            await asyncio.sleep(POLL_S)
        if outcome.superseded:
            raise InvalidRequest("Another router changed how this model is served at the same time.")
        if outcome.failures:
            raise InvalidRequest(f"{param}: {outcome.failures[0]}", param=param)
        if outcome.missing:
            left = ", ".join(outcome.missing)
            raise DeadlineExceeded(f"{param}: not completed within {timeout_s:g} s by {left}")
        if not outcome.num_done:
            raise Unavailable("No worker is ready.", retry_after_s=RETRY_AFTER_S)
        return outcome.num_done

    def _send(self, order: SetServing) -> None:
        self._serving.order(order)
        for worker in self._serving.workers():
            self._fleet.send(worker.address, order)  # resent after the next heartbeat if lost

    def _next_version(self) -> int:
        return max(time.time_ns() // 1000, self._serving.newest.version + 1)

    def _check_update(self) -> SetServing:
        """Return the newest order. Raises RequestError if the weights cannot change now."""
        self._check_awake("an update")
        if self._serving.mode == "hold":
            raise InvalidRequest(
                "mode: requests that a pause with mode=keep holds have KV of the current weights: resume first, or "
                "pause with mode=abort or mode=wait"
            )
        self._check_workers()
        return self._serving.newest

    def _most_bytes(self) -> int:
        """Return the maximum size of a file with the tensors of this model. Raises InvalidRequest."""
        sizes = {worker.name: worker.identity.memory_bytes for worker in self._serving.workers()}
        if unknown := [name for name, num_bytes in sizes.items() if not num_bytes]:
            raise InvalidRequest(f"{unknown[0]} does not run Diptych's engine, and cannot change its weights")
        return max(sizes.values()) + MAX_HEAD_BYTES

    def _check_awake(self, what: str) -> None:
        if self.is_asleep:
            raise InvalidRequest(f"The workers are asleep: call /wake_up before {what}.")

    def _check_workers(self) -> None:
        workers = list(self._serving.workers())
        if not workers:
            raise Unavailable("No worker is ready.", retry_after_s=RETRY_AFTER_S)
        for worker in workers:
            if worker.identity.protocol < SERVING_PROTOCOL:
                raise InvalidRequest(
                    f"{worker.name} has version {worker.identity.version}, which cannot be paused, put to sleep or "
                    "given other weights: finish the upgrade first"
                )

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Allow one order at a time. Raises InvalidRequest."""
        if self._is_busy:
            raise InvalidRequest("Another pause, sleep or update of this model is in progress.")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


def _next(before: SetServing, version: int, **fields: object) -> SetServing:
    """Return an order that only changes `fields`."""
    plain = {"staged": "", "staged_number": 0, "aborts": False, "lease_s": 0.0}
    return msgspec.structs.replace(before, version=version, **(plain | fields))
