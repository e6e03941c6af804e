"""Carries out what `RolePolicy` decides: one order at a time, by one router.

Each worker tells all routers which of them plans (`WorkerHeartbeat.planner`): the one with the least id. A router gives
orders only while every ready worker names it, so routers that see different workers do nothing rather than quarrel.
"""

from __future__ import annotations

import logging
from collections import Counter

from common.config import RouterConfig
from common.wire.message_fields import Role
from common.wire.messages import ChangeRole
from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Send
from router.dispatch.roles import RoleChange, RoleLimits, RolePolicy
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import WorkerState

log = logging.getLogger(__name__)
ANSWER_S = 2.0
"""How long a worker with an order may seem ready in its old role; after that it did not obey, or went back to it."""


class RoleChanges:
    """Does nothing without `--role-change`."""

    def __init__(
        self, config: RouterConfig, registry: WorkerRegistry, send: Send, router_id: str, counters: DispatchCounters
    ) -> None:
        self._registry, self._send, self._router_id, self._counters = registry, send, router_id, counters
        self._is_on = config.role_change
        self._policy = RolePolicy(
            RoleLimits(
                ttft_s=config.slo_ttft_ms / 1000,
                tpot_s=config.slo_tpot_ms / 1000,
                least=(config.min_prefill, config.min_decode),
                after_s=config.role_change_after_s,
                interval_s=config.role_change_interval_s,
            )
        )
        self._open: RoleChange | None = None
        self._answer_by = 0.0
        self._num_seen = 0
        self._num_refused = Counter[Role]()

    def tick(self, now: float) -> None:
        """Order a change if one is due; at each tick."""
        if not self._is_on:
            return
        if self._num_seen != (seen := sum(self._registry.role_changes.values())):
            self._num_seen = seen
            self._policy.changed(now)
        for role, num in self._counters.num_refused_for.items():
            if num > self._num_refused[role]:
                self._num_refused[role] = num
                self._policy.refused(role, now)
        self._follow(now)
        prefill, decode = self._registry.ready("prefill"), self._registry.ready("decode")
        named = {worker.beat.planner for worker in (*prefill, *decode) if worker.beat is not None}
        if self._open is not None or named != {self._router_id}:
            return
        change = self._policy.choose(prefill, decode, now)
        if change is not None:
            self._order(change, now)

    def _order(self, change: RoleChange, now: float) -> None:
        worker = self._registry.workers[change.address]
        if not self._send(change.address, ChangeRole(role=change.role, reason=change.reason)):
            return  # the policy waits for its interval, and finds the worker or another one
        where = f"{worker.worker_id} ({worker.address})"
        log.info("worker %s is to change from %s to %s: %s", where, worker.role, change.role, change.reason)
        self._open, self._answer_by = change, now + ANSWER_S

    def _follow(self, now: float) -> None:
        """Close the order that is open once its worker has changed, will not, or is gone."""
        if (change := self._open) is None:
            return
        worker = self._registry.workers.get(change.address)
        if worker is not None and worker.state is WorkerState.DRAINING:
            self._answer_by = now + ANSWER_S
            return
        if worker is None or worker.role == change.role:
            self._open = None
        elif now > self._answer_by:
            self._open = None
            log.warning("worker %s did not become a %s worker: %s", change.address, change.role, worker.describe(now))
