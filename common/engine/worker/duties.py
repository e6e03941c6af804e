"""Runs a worker's current role: the first one at startup, others when routers order them.

    ChangeRole ─> drain ─> stop the engine ─> build the other role's engine ─> hello with a new epoch
                   │                           └── fails: rebuild the previous role, hello with a new epoch
                   └── requests remain after ROLE_DRAIN_S: keep the role

The model, its KV memory, the compiled grammars and the step times survive a role change. The step time model is kept
per role, because steps of one role say little about the other. Routers use the pool's model until a worker has its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from common.config import WorkerConfig
from common.engine.kv import BlockLog
from common.engine.worker.control import ControlServer
from common.engine.worker.duty import Duty, DutyOffer, WorkerParts
from common.engine.worker.engine import Engine
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.step_times import StepTimes
from common.engine.worker.vitals import WorkerIdentity
from common.errors import RankLost
from common.latency import StepFit
from common.machine import CoreShare
from common.model_files import ModelFiles
from common.wire import Curve, Role
from common.wire.messages import ChangeRole

if TYPE_CHECKING:
    from common.engine.run import LoadedModel
    from common.grammar import Grammars

log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
"""Interval, in seconds, of checks that all requests have ended, and of attempts to bind."""
ROLE_DRAIN_S = 30.0
"""Drain time, in seconds, before a role change. If requests remain afterwards, the worker keeps its role."""
BIND_S = 2.0
"""Time, in seconds, that the system may take to release the KV port of the previous role."""


class Duties:
    """The current role with its engine and identity. Used on the event loop.

    `engine` is None before the model is loaded and during a role change.
    """

    def __init__(
        self,
        home: DutyOffer,
        other: DutyOffer | None,
        context: zmq.Context[zmq.Socket[bytes]],
        curve: Curve | None,
        metrics: WorkerMetrics,
        identity: WorkerIdentity,
    ) -> None:
        """`other`: role to which a router may change the worker; None if the role is fixed."""
        self._context, self._curve, self._metrics = context, curve, metrics
        self._offers = {offer.role: offer for offer in (home, other) if offer is not None}
        self.identity = identity
        self.engine: Engine | None = None
        self.loaded: LoadedModel | None = None
        self.kv_address = ""
        self.is_draining = False
        self._files: ModelFiles | None = None
        self._grammars: Grammars | None = None
        self._duty = self._new(home.role, identity)
        self._has_unused_socket = False
        self._fits = {role: StepFit() for role in self._offers}
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
        return len(self._offers) > 1 and (self.loaded is None or self.loaded.task.generates)

    # ------------------------------------------------------------ first role and shutdown

    def bind(self) -> None:
        """Bind the first role's KV socket, before the model is loaded. Raises zmq.ZMQError."""
        self.kv_address = self._duty.bind()
        self._has_unused_socket = True

    def start(
        self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, control: ControlServer, times: StepTimes
    ) -> None:
        """Start the first role. Takes ownership of `grammars`."""
        self._files, self.loaded, self._grammars = files, loaded, grammars
        self.engine = self._start_engine(self._duty, control, times)
        self._has_unused_socket = False

    def stop(self) -> bool:
        """Stop the engine. Blocks; returns False if its thread still runs."""
        has_ended = True
        if self.engine is not None:
            has_ended = self.engine.stop()
        elif self._has_unused_socket:
            self._duty.close_kv()
        if self.loaded is not None and self.loaded.others is not None:
            self.loaded.others.close()
        if self._grammars is not None:
            self._grammars.close()
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
        others = self.loaded.others if self.loaded is not None else None
        return others is not None and others.is_leaving

    def check(self) -> None:
        """Raise the error of a role change that left the worker without an engine, or RankLost."""
        others = self.loaded.others if self.loaded is not None else None
        if others is not None and (why := others.failure):
            raise RankLost(why)
        if self._change is not None and self._change.done():
            change, self._change = self._change, None
            change.result()

    # ------------------------------------------------------------ role change

    def order(self, order: ChangeRole, control: ControlServer) -> None:
        """Start changing the role, if possible."""
        if order.role not in self._offers or not self.may_change:
            why = "the role is fixed: --role-change is off, or the model does not generate text"
        elif order.role == self.role:
            why = "this is already its role"
        elif self._change is not None:
            why = "a role change is already in progress"
        elif self.engine is None or self.is_draining:
            why = "the worker is starting or draining"
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
            await self._take_up(order.role, engine, control)
        except Exception:  # whatever the error, the previous role worked
            log.exception("role change to %s failed: returning to %s", order.role, before)
            await self._take_up(before, engine, control)
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

    async def _take_up(self, role: Role, former: Engine, control: ControlServer) -> None:
        """Start a role with a new epoch. Releases everything if it raises."""
        identity = self.identity.renewed(role)
        duty = self._new(role, identity)
        address = await _bind_again(duty.bind)
        self._metrics.change_role(role)
        try:
            engine = self._start_engine(duty, control, former.step_times)
        except BaseException:
            duty.close_kv()
            raise
        self.identity, self.kv_address, self._duty, self.engine = identity, address, duty, engine

    def _new(self, role: Role, identity: WorkerIdentity) -> Duty:
        return self._offers[role].begin(WorkerParts(identity, self._context, self._curve, self._metrics))

    def _start_engine(self, duty: Duty, control: ControlServer, times: StepTimes) -> Engine:
        """`times`: step times of this worker in all roles."""
        files, loaded, grammars = self._files, self.loaded, self._grammars
        assert files is not None and loaded is not None and grammars is not None  # set before the first engine starts
        shared = grammars.shared()
        try:
            engine = duty.build_engine(files, loaded, shared, control.send_threadsafe)
        except BaseException:
            shared.close()
            raise
        engine.step_times, engine.step_fit = times, self._fits[duty.role]
        config = duty.config
        if config.core_share and not config.on_gpu:
            cores = CoreShare(config.core_share, loaded.num_threads)
            loaded.share_cores(cores)
            engine.share_cores(cores, loaded.set_num_threads)
        engine.start()
        return engine


async def _bind_again(bind: Callable[[], str]) -> str:
    """Bind a KV socket, possibly on the port of the previous role. Raises zmq.ZMQError after `BIND_S`."""
    deadline = time.monotonic() + BIND_S
    while True:
        try:
            return bind()
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(DRAIN_POLL_S)
