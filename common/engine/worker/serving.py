"""How a worker serves, as ordered by routers: running, paused or asleep, and with which weights.

    stage other weights ─> drain ─> exchange the weights ─> hello with a new epoch and fingerprint
                                     └── fails: serve with the previous weights

KV of old weights never meets new ones: the exchange begins with an empty prefix cache, and the fingerprint, by which
transfers are paired and tiers are named, covers the number of the weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from hashlib import blake2b

import msgspec

from common.engine.worker.adapters import MAX_SHOWN_REASON
from common.engine.worker.contract import Holdable, ServedModel
from common.engine.worker.control import ControlServer
from common.engine.worker.duties import DRAIN_POLL_S, Duties
from common.engine.worker.received_weights import WeightsReceiver
from common.errors import ModelError
from common.model_files import ModelFiles, ReceivedWeights, with_received
from common.wire.messages import ServingState, ServingStatus, SetServing, WeightsPart

log = logging.getLogger(__name__)
EXCHANGE_END_S = 30.0
"""Maximum time, in seconds, that `close` waits for an exchange of weights in progress."""
Exchange = Callable[[], ServedModel]
"""Returns the model with other weights, which have been loaded. No engine may use the model."""


class _Superseded(Exception):
    """A newer order exists."""


class WorkerServing:
    """Executes `SetServing` orders, one at a time. Used on the event loop.

    `load(files)` loads the worker's model after a sleep, on a thread; `resolve(name)` finds the files of a model, on a
    thread. `on_change` is called when the state changes.
    """

    def __init__(
        self,
        duties: Duties,
        load: Callable[[ModelFiles], ServedModel],
        on_change: Callable[[], None],
        resolve: Callable[[str], ModelFiles],
        release: Callable[[Collection[str]], None],
    ) -> None:
        self._duties, self._load, self._on_change, self._resolve = duties, load, on_change, resolve
        self._release = release
        self._order = SetServing(version=0)
        self._status: ServingStatus = "done"
        self._message = ""
        self._number, self.weight_version = 0, ""
        self._staged: tuple[int, Exchange] | None = None
        self._is_asleep = self._is_closing = False
        self.is_waking = False
        """Whether a thread loads the model after a sleep. It cannot be interrupted."""
        self._task: asyncio.Task[None] | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._receiver = WeightsReceiver()

    @property
    def state(self) -> ServingState | None:
        """State for heartbeats; None before the first order."""
        if not self._order.version:
            return None
        order = self._order
        return ServingState(
            version=order.version,
            mode=order.mode,
            status=self._status,
            weights=order.weights,
            weights_number=order.weights_number,
            weight_version=order.weight_version,
            active_number=self._number,
            aborts=order.aborts,
            message=self._message,
        )

    @property
    def condition(self) -> str:
        """State for probes: "asleep", "paused" or ""."""
        return "asleep" if self._is_asleep else "paused" if self._order.mode != "run" else ""

    def order(self, order: SetServing, control: ControlServer) -> None:
        """Begin to execute an order, unless it is older than the last one."""
        if order.version <= self._order.version or self._is_closing:
            return
        self._order, self._status, self._message = order, "busy", ""
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        if order.lease_s > 0.0:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(order.lease_s, self._end_lease, order, control)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._execute(control), name="serving orders")

    def on_part(self, router: bytes, part: WeightsPart) -> None:
        """Process a part of weights that a router sends."""
        self._receiver.on_part(router, part)

    def check(self) -> None:
        """Raise the error of an exchange that left the worker without an engine."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """Stop waiting, let held requests continue, and finish an exchange in progress."""
        self._is_closing = True
        self._hold(False)
        if self._lease is not None:
            self._lease.cancel()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=EXCHANGE_END_S)
        self._receiver.close()
        self.check()

    # ------------------------------------------------------------ inside

    def _end_lease(self, order: SetServing, control: ControlServer) -> None:
        if self._order is order:
            log.warning("no router completed its order within %g s: serving with the previous weights", order.lease_s)
            back = msgspec.structs.replace(order, version=order.version + 1, mode="run", staged="", lease_s=0.0)
            self.order(back, control)

    async def _execute(self, control: ControlServer) -> None:
        self._duties.has_order = True
        try:
            await self._execute_orders(control)
        finally:
            self._duties.has_order = False

    async def _execute_orders(self, control: ControlServer) -> None:
        while self._status == "busy":
            order = self._order
            try:
                await self._carry_out(order, control)
            except _Superseded:
                if self._is_closing:
                    return
                continue
            except Exception as error:  # whatever the error, the worker continues if it has an engine
                if self._duties.engine is None and not self._is_asleep:
                    raise
                why = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
                log.error("order to serve in mode %s failed: %s", order.mode, why)
                status: ServingStatus = "failed"
            else:
                status, why = "done", ""
            if status == "failed":  # nothing references the error any more, whose traceback references models
                await self._duties.free_replaced()
            if order is self._order:
                self._status, self._message = status, why[:MAX_SHOWN_REASON]
            self._on_change()

    async def _carry_out(self, order: SetServing, control: ControlServer) -> None:
        """Execute one order. Raises _Superseded when a newer one exists, or the error that prevents it."""
        duties = self._duties
        await self._until(order, lambda: self._is_asleep or (duties.engine is not None and not duties.is_changing))
        if order.mode == "sleep" and not self._is_asleep:
            self._check_sleep()
        if order.mode == "hold":
            self._check_hold()
        wanted = order.staged_number if order.staged else order.weights_number
        if self._staged is not None and self._staged[0] not in (wanted, order.weights_number):
            self._staged = None
        if order.staged:
            await self._stage(order.staged, order.staged_number, order, control)
        is_outdated = order.weights_number != self._number and not self._is_asleep
        exchanges = is_outdated and not order.staged  # an update may replace weights that no longer exist
        if exchanges:
            await self._stage(order.weights, order.weights_number, order, control)
        self._hold(order.mode == "hold" and not exchanges)
        duties.is_draining = is_outdated or order.mode != "run" or self._is_asleep
        self._on_change()
        if exchanges or order.mode in ("pause", "sleep"):
            await self._until(order, self._is_empty)
        if exchanges:
            await self._exchange(order, control)
            self._hold(order.mode == "hold")
        if order.mode == "sleep" and not self._is_asleep:
            await duties.unload()
            self._is_asleep = True
            log.info("asleep: freed the model's memory")
        elif order.mode in ("run", "pause") and self._is_asleep:
            await self._wake(order, control)
        await self._receiver.keep(order.weights, order.staged)
        self._release((order.weights, order.staged))
        if order.mode == "run" and order.weights_number == self._number:
            duties.is_draining = False
            control.broadcast_hello()

    async def _stage(self, weights: str, number: int, order: SetServing, control: ControlServer) -> None:
        """Load weights of an order next to the current ones. Raises ModelError and _Superseded."""
        if number == self._number or (self._staged is not None and self._staged[0] == number):
            return
        self._staged = None
        renew, model = self._duties.renew, self._duties.model
        if renew is None or model is None:
            raise ModelError(f"--engine {self._duties.config.engine} cannot change its weights: restart the worker")
        began = time.monotonic()
        files = await self._files(weights, number, order, control)
        exchange = await asyncio.to_thread(renew, model, files)
        self._staged = number, exchange
        log.info("staged weights %s in %.1f s", weights or self._duties.config.model, time.monotonic() - began)

    async def _exchange(self, order: SetServing, control: ControlServer) -> None:
        assert self._staged is not None  # staged first
        (number, exchange), self._staged = self._staged, None
        began, before = time.monotonic(), (self._number, self.weight_version)
        self._number, self.weight_version = number, order.weight_version
        try:
            await self._duties.exchange(exchange, control)
        except Exception:
            self._number, self.weight_version = before
            raise
        finally:
            del exchange  # it references the previous model
            if self._duties.engine is not None:
                control.broadcast_hello()
        await self._duties.free_replaced()
        log.info(
            "weights changed to version %s in %.3f s", order.weight_version or "of the start", time.monotonic() - began
        )

    async def _wake(self, order: SetServing, control: ControlServer) -> None:
        began = time.monotonic()
        number = order.weights_number
        files = await self._files(order.weights, number, order, control)
        self.is_waking = True
        try:
            await self._duties.reload(lambda: self._load(files), control)
        finally:
            self.is_waking = False
        self._number, self.weight_version = number, order.weight_version
        self._is_asleep = False
        control.broadcast_hello()
        log.info("awake: loaded the model in %.1f s", time.monotonic() - began)

    async def _files(self, weights: str, number: int, order: SetServing, control: ControlServer) -> ModelFiles:
        """Find weights under the name of the served model. Their number is part of their hash."""
        received = ReceivedWeights.parse(weights)
        if received is None:
            files = await asyncio.to_thread(self._resolve, weights or self._duties.config.model)
        else:
            path = await self._receiver.fetch(received, control, lambda: self._check_current(order))
            own = await asyncio.to_thread(self._resolve, self._duties.config.model)
            files = await asyncio.to_thread(with_received, own, path, received.sha256)
        facts = self._duties.facts
        if number and facts is not None:
            salted = blake2b(f"{files.weights_hash} {number}".encode(), digest_size=8).hexdigest()
            files = msgspec.structs.replace(files, model_id=facts.model_id, weights_hash=salted)
        return files

    def _check_sleep(self) -> None:
        """Raise ModelError if the worker cannot free its model."""
        config = self._duties.config
        if not self._duties.can_unload:
            on_hosts = " with --rank-hosts" if config.rank_hosts > 1 else ""
            raise ModelError(f"--engine {config.engine}{on_hosts} cannot sleep: use level 0, or scale the pool to zero")
        if config.lora_places:
            raise ModelError("a worker with --max-loras cannot sleep, because it would lose its adapters")

    def _check_hold(self) -> None:
        """Raise ModelError if the engine cannot suspend its steps."""
        if self._duties.engine is not None and not isinstance(self._duties.engine, Holdable):
            raise ModelError(f"--engine {self._duties.config.engine} cannot hold requests: use the mode wait or abort")

    def _hold(self, is_held: bool) -> None:
        engine = self._duties.engine
        if isinstance(engine, Holdable):
            engine.hold(is_held and not self._is_closing)

    def _is_empty(self) -> bool:
        engine = self._duties.engine
        return engine is None or (engine.is_empty and not engine.has_commands)

    async def _until(self, order: SetServing, true: Callable[[], bool]) -> None:
        """Wait until a condition is true. Raises _Superseded. Routers and the lease bound the wait by newer orders."""
        while not true():
            self._check_current(order)
            await asyncio.sleep(DRAIN_POLL_S)
        self._check_current(order)

    def _check_current(self, order: SetServing) -> None:
        if order is not self._order or self._is_closing:
            raise _Superseded
