"""The duties of a worker process, one after the other: the first one at its start, others when routers order them.

    ChangeRole ─> drain ─> stop the engine ─> build that of the other role ─> hello with a new epoch
                   │                           └── fails: build one of the role before, hello with a new epoch
                   └── requests are left after ROLE_DRAIN_S: go on as before

The model, its KV memory, the compiled grammars and how long steps took outlast a duty. The fit of steps is kept for
each role: that of one knows little of the other, and a router takes the pool's until a worker has its own.
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
"""Between two looks whether the last request has ended, and between two tries to bind."""
ROLE_DRAIN_S = 30.0
"""How long a worker that is to change its role takes nothing new. If requests are left then, it stays what it is."""
BIND_S = 2.0
"""How long the system may take to release the KV port that an earlier duty had."""


class Duties:
    """The present duty, its engine and its identity. Belongs to the event loop.

    `engine` is None before the model is loaded, and for a moment between two duties.
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
        """`other` is the role that a router may change the worker to; None: its role is pinned."""
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
        """The settings of the present role."""
        return self._duty.config

    @property
    def lend_address(self) -> str:
        """Where other workers copy cached blocks of the present duty."""
        return self._duty.lend_address

    @property
    def block_log(self) -> BlockLog:
        """What the prefix cache of the present duty holds."""
        return self._duty.block_log

    @property
    def may_change(self) -> bool:
        """Whether a router may change the role: a worker whose model generates no text has nothing to decode."""
        return len(self._offers) > 1 and (self.loaded is None or self.loaded.task.generates)

    # ------------------------------------------------------------ the first duty, and the end

    def bind(self) -> None:
        """Bind the first duty's KV socket, before the model is loaded. Raises zmq.ZMQError."""
        self.kv_address = self._duty.bind()
        self._has_unused_socket = True

    def start(
        self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, control: ControlServer, times: StepTimes
    ) -> None:
        """Begin the first duty. Owns `grammars` from now on."""
        self._files, self.loaded, self._grammars = files, loaded, grammars
        self.engine = self._start_engine(self._duty, control, times)
        self._has_unused_socket = False

    def stop(self) -> bool:
        """End the engine; False when its thread still runs. Blocks."""
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
        """Before the end: a change that still drains is given up, one that has stopped its engine is completed."""
        self._is_leaving = True
        if (change := self._change) is not None:
            await asyncio.wait({change})
            self.check()

    @property
    def must_drain(self) -> bool:
        """Whether another host, with ranks of this worker, wants to end."""
        others = self.loaded.others if self.loaded is not None else None
        return others is not None and others.is_leaving

    def check(self) -> None:
        """Raises the error of a change that left the worker without an engine, or RankLost."""
        others = self.loaded.others if self.loaded is not None else None
        if others is not None and (why := others.failure):
            raise RankLost(why)
        if self._change is not None and self._change.done():
            change, self._change = self._change, None
            change.result()

    # ------------------------------------------------------------ another role

    def order(self, order: ChangeRole, control: ControlServer) -> None:
        """Begin to change the role, if the worker may and is not at it already."""
        if order.role not in self._offers or not self.may_change:
            why = "its role is pinned: --role-change is off, or its model generates no text"
        elif order.role == self.role:
            why = "it is one"
        elif self._change is not None:
            why = "it changes its role already"
        elif self.engine is None or self.is_draining:
            why = "it does not serve"
        else:
            self._change = asyncio.create_task(self._change_role(order, self.engine, control), name="change of role")
            return
        log.warning("ignores the order to become a %s worker: %s", order.role, why)

    async def _change_role(self, order: ChangeRole, engine: Engine, control: ControlServer) -> None:
        """Raises what keeps the worker from having any role."""
        log.info("changes from %s to %s: %s", self.role, order.role, order.reason)
        began, before = time.monotonic(), self.role
        self.is_draining = True
        control.broadcast_heartbeat()
        if not await self._is_left(engine, began + ROLE_DRAIN_S):
            log.warning("stays a %s worker: %d requests are left", before, engine.status.num_active)
            self.is_draining = False
            control.broadcast_heartbeat()
            return
        drained_at, self.engine = time.monotonic(), None
        if not await asyncio.to_thread(engine.stop):
            raise RuntimeError("the engine of the role before did not stop")
        engine.check_integrity()
        try:
            await self._take_up(order.role, engine, control)
        except Exception:  # whatever it was, the worker was of use in the role before
            log.exception("cannot become a %s worker: goes back to %s", order.role, before)
            await self._take_up(before, engine, control)
        self.is_draining = False
        control.broadcast_hello()
        drain_s, change_s = drained_at - began, time.monotonic() - drained_at
        log.info("is a %s worker now: drained in %.3f s, changed in %.3f s", self.role, drain_s, change_s)

    async def _is_left(self, engine: Engine, deadline: float) -> bool:
        """Wait until all requests have left; False at the deadline, and when the process is to end."""
        while engine.alive and not self._is_leaving and time.monotonic() < deadline:
            if engine.is_empty and not engine.has_commands:
                return True
            await asyncio.sleep(DRAIN_POLL_S)
        return False

    async def _take_up(self, role: Role, former: Engine, control: ControlServer) -> None:
        """Start a duty with an epoch of its own; nothing is left of it if that raises."""
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
        """`times` are those of all steps of this worker, in whatever role."""
        files, loaded, grammars = self._files, self.loaded, self._grammars
        assert files is not None and loaded is not None and grammars is not None  # set before the first engine
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
    """Bind a KV socket, maybe on the port of an earlier duty. Raises zmq.ZMQError after `BIND_S`."""
    deadline = time.monotonic() + BIND_S
    while True:
        try:
            return bind()
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(DRAIN_POLL_S)
