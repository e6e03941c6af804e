"""Runs a worker's current role: the first one at startup, others when routers order them.

    ChangeRole ─> drain ─> stop the engine ─> build the other role's engine ─> hello with a new epoch
                   │                           └── fails: rebuild the previous role, hello with a new epoch
                   └── requests remain after ROLE_DRAIN_S: keep the role

The model and its KV memory survive a role change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from common.config import WorkerConfig
from common.engine.kv import BlockLog
from common.engine.worker.contract import Duty, DutyOffer, Engine, ModelFacts, RequestReceived, ServedModel, WorkerParts
from common.engine.worker.control import ControlServer
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.vitals import WorkerIdentity
from common.errors import InUseError, RankLost
from common.model_files import ModelFiles
from common.wire import Curve, Role
from common.wire.messages import ChangeRole

log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
"""Interval, in seconds, of checks that all requests have ended, and of attempts to bind."""
ROLE_DRAIN_S = 30.0
"""Drain time, in seconds, before a role change. If requests remain afterwards, the worker keeps its role."""
BIND_S = 2.0
"""Time, in seconds, that the system may take to release the KV port of the previous role."""
OPEN_S = 5.0
"""Time, in seconds, that a slow disk may take to release the KV file of the previous role."""
T = TypeVar("T")


class Duties:
    """The current role with its engine and identity. Used on the event loop.

    `engine` is None before the model is loaded and during a role change.
    """

    def __init__(
        self,
        home: DutyOffer[Any],
        other: DutyOffer[Any] | None,
        context: zmq.Context[zmq.Socket[bytes]],
        curve: Curve | None,
        metrics: WorkerMetrics,
        identity: WorkerIdentity,
    ) -> None:
        """`other`: role to which a router may change the worker; None if the role is fixed."""
        self._context, self._curve, self._metrics = context, curve, metrics
        self._offers = {offer.role: offer for offer in (home, other) if offer is not None}
        self._home = home
        self.identity = identity
        self.engine: Engine | None = None
        self.model: ServedModel | None = None
        self.facts: ModelFacts | None = None
        """Facts of the model, once the first engine was started."""
        self.is_draining = self.has_order = False
        """`has_order`: an order to serve is executed. It may set `is_draining`, so no role change begins."""
        self.pending_reset: RequestReceived | None = None
        """`ResetPrefixCache` that arrived without an engine. The next one applies it: a file keeps its blocks."""
        self._duty = self._new(home.role, identity)
        self._has_unused_socket = False
        self._change: asyncio.Task[None] | None = None
        self._is_leaving = False

    @property
    def role(self) -> Role:
        return self._duty.role

    @property
    def config(self) -> WorkerConfig:
        """Settings of the current role."""
        return self._duty.config

    @property
    def kv_address(self) -> str:
        """Addresses at which the current role receives KV."""
        return self._duty.kv_address

    @property
    def lend_address(self) -> str:
        """Address from which other workers copy cached blocks."""
        return self._duty.lend_address

    @property
    def block_log(self) -> BlockLog:
        """Log of the current role's prefix cache."""
        return self._duty.block_log

    @property
    def may_change(self) -> bool:
        """Whether a router may change the role. Models that do not generate text have no decode role."""
        return len(self._offers) > 1 and (self.facts is None or self.facts.changes_role)

    # ------------------------------------------------------------ first role and shutdown

    def bind(self) -> None:
        """Bind the first role's sockets, before the model is loaded. Raises zmq.ZMQError or ConfigError."""
        self._duty.bind()
        self._has_unused_socket = True

    def adopt(self, model: ServedModel) -> None:
        """Take ownership of the loaded model."""
        self.model = model

    def start(self, control: ControlServer) -> None:
        """Start the first role with the adopted model."""
        self.engine = self._start_engine(self._duty, control)
        self._has_unused_socket = False

    def stop(self) -> bool:
        """Stop the engine and release the model. Blocks; returns False if the engine still runs."""
        has_ended = True
        if self.engine is not None:
            has_ended = self.engine.stop()
        elif self._has_unused_socket:
            self._duty.close_kv()
        if self.model is not None:
            self.model.close()
        return has_ended

    async def settle(self) -> None:
        """Finish a role change before shutdown: abort it while it drains, otherwise wait for its completion."""
        self._is_leaving = True
        if (change := self._change) is not None:
            await asyncio.wait({change})
            self.check()

    @property
    def must_drain(self) -> bool:
        """Whether another host with ranks of this worker is shutting down."""
        return self.model is not None and self.model.is_leaving

    def check(self) -> None:
        """Raise the error of a role change that left the worker without an engine, or RankLost."""
        if self.model is not None and (why := self.model.failure):
            raise RankLost(why)
        if self._change is not None and self._change.done():
            change, self._change = self._change, None
            change.result()

    # ------------------------------------------------------------ weights and memory

    @property
    def renew(self) -> Callable[[Any, ModelFiles], Callable[[], ServedModel]] | None:
        """See `DutyOffer`; None if the engine cannot change its weights."""
        return self._home.renew

    @property
    def can_unload(self) -> bool:
        """Whether `unload` is possible."""
        return self._home.free is not None

    @property
    def is_changing(self) -> bool:
        """Whether a role change is in progress."""
        return self._change is not None and not self._change.done()

    async def exchange(self, renewed: Callable[[], ServedModel], control: ControlServer) -> None:
        """Serve with the model that `renewed` returns, in the same role with a new epoch. The engine must be empty.

        If that fails, serves with the previous model and raises. Without any engine, raises with `engine` None.
        """
        before = self.model
        await self._end_engine()
        try:
            self.model = await _on_thread(renewed)
            await self._take_up(self.role, control)
        except Exception:
            self.model = before
            await self._take_up(self.role, control)
            raise

    async def free_replaced(self) -> None:
        """Free the memory of models that an exchange has replaced or could not start, while another one serves."""
        if self._home.renew is not None and (free := self._home.free) is not None:
            await asyncio.to_thread(free)

    async def unload(self) -> None:
        """Stop the empty engine and free the model's memory."""
        await self._end_engine()
        self._duty = self._new(self.role, self.identity)  # the previous one references the engine and KV memory
        await self._free_model()

    async def reload(self, load: Callable[[], ServedModel], control: ControlServer) -> None:
        """Load the model after `unload`, and serve it in the same role with a new epoch. Frees it if that fails."""
        begun = self._begun(self.role)
        try:
            self.model = await _on_thread(load)
            await self._enter(*begun, control)
        except Exception:
            await self._free_model()
            raise

    async def _free_model(self) -> None:
        model, self.model = self.model, None
        if model is not None:
            await _on_thread(model.close)
        del model
        if (free := self._home.free) is not None:
            await asyncio.to_thread(free)

    async def _end_engine(self) -> None:
        engine, self.engine = self.engine, None
        assert engine is not None  # the caller has seen it empty
        if not await _on_thread(engine.stop):
            raise RuntimeError(f"the engine of the {self.role} role did not stop")
        engine.check_integrity()

    # ------------------------------------------------------------ role change

    def order(self, order: ChangeRole, control: ControlServer) -> None:
        """Start changing the role, if possible."""
        if order.role not in self._offers or not self.may_change:
            why = "the role is fixed: --role-change is off, or the model does not generate text"
        elif order.role == self.role:
            why = "this is already its role"
        elif self._change is not None:
            why = "a role change is already in progress"
        elif self.engine is None or self.is_draining or self.has_order:
            why = "the worker is starting, draining or executing an order to serve"
        else:
            self._change = asyncio.create_task(self._change_role(order, self.engine, control), name="change of role")
            return
        log.warning("ignored the order to change role to %s: %s", order.role, why)

    async def _change_role(self, order: ChangeRole, engine: Engine, control: ControlServer) -> None:
        """Change the role. Raises if the worker ends up without any role."""
        log.info("changing role from %s to %s: %s", self.role, order.role, order.reason)
        began, before = time.monotonic(), self.role
        self.is_draining = True
        control.broadcast_heartbeat()
        if not await self._is_left(engine, began + ROLE_DRAIN_S):
            log.warning(
                "role change cancelled, still %s: %d requests remain after draining for %g s",
                *(before, engine.status.num_active, ROLE_DRAIN_S),
            )
            self.is_draining = False
            control.broadcast_heartbeat()
            return
        drained_at, self.engine = time.monotonic(), None
        if not await asyncio.to_thread(engine.stop):
            raise RuntimeError(f"the engine of the {before} role did not stop")
        engine.check_integrity()
        try:
            await self._take_up(order.role, control)
        except Exception:  # whatever the error, the previous role worked
            log.exception("role change to %s failed: returning to %s", order.role, before)
            await self._take_up(before, control)
        self.is_draining = False
        control.broadcast_hello()
        drain_s, change_s = drained_at - began, time.monotonic() - drained_at
        log.info(
            "role changed from %s to %s: drained in %.3f s, changed in %.3f s",
            *(before, self.role, drain_s, change_s),
        )

    async def _is_left(self, engine: Engine, deadline: float) -> bool:
        """Wait until all requests have ended. Returns False at the deadline or at shutdown."""
        while engine.alive and not self._is_leaving and time.monotonic() < deadline:
            if engine.is_empty and not engine.has_commands:
                return True
            await asyncio.sleep(DRAIN_POLL_S)
        return False

    async def _take_up(self, role: Role, control: ControlServer) -> None:
        """Start a role with a new epoch. Releases everything if it raises."""
        await self._enter(*self._begun(role), control)

    def _begun(self, role: Role) -> tuple[WorkerIdentity, Duty[Any]]:
        identity = self.identity.renewed(role)
        return identity, self._new(role, identity)

    async def _enter(self, identity: WorkerIdentity, duty: Duty[Any], control: ControlServer) -> None:
        await _retried(duty.bind, zmq.ZMQError, BIND_S)
        self._metrics.change_role(duty.role)
        try:
            engine = await _retried(lambda: self._start_engine(duty, control), InUseError, OPEN_S)
        except BaseException:
            duty.close_kv()
            raise
        self.identity, self._duty, self.engine = identity, duty, engine

    def _new(self, role: Role, identity: WorkerIdentity) -> Duty[Any]:
        return self._offers[role].begin(WorkerParts(identity, self._context, self._curve, self._metrics))

    def _start_engine(self, duty: Duty[Any], control: ControlServer) -> Engine:
        assert self.model is not None  # adopted before the first engine starts
        engine = duty.build_engine(self.model, control.send_threadsafe)
        engine.start()
        if self.pending_reset is not None and engine.submit(self.pending_reset):
            self.pending_reset = None
        self.facts = self.model.facts
        return engine


async def _on_thread(call: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, which may reference `call`, and so a model, for a moment after it has returned."""
    calls = [call]
    return await asyncio.to_thread(lambda: calls.pop()())


async def _retried(acquire: Callable[[], T], error: type[Exception], limit_s: float) -> T:
    """Acquire something that the previous role may release late. Raises its `error` after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return acquire()
        except error:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(DRAIN_POLL_S)
