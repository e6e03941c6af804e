"""Executes the decisions of `RolePolicy`, one at a time, on one router.

All workers report in their heartbeats which router plans (`WorkerHeartbeat.planner`): the one with the lowest id. A
router gives orders only while every ready worker names it. Routers that see different workers therefore do nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from common.config import RouterConfig
from common.wire import Role
from common.wire.messages import ChangeRole
from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Send
from router.fleet import WorkerRegistry, WorkerState
from router.policy import (
    CHANGE_AFTER_S,
    CHANGE_INTERVAL_S,
    RoleChange,
    RoleLimits,
    RolePolicy,
    SplitForecast,
    SplitForecaster,
)

log = logging.getLogger(__name__)
ANSWER_S = 2.0
"""Time for a worker with an order to leave its old role, in seconds. After it, the order counts as not followed."""


LOOK_S = 0.5
"""Interval at which role changes are considered, in seconds. Each evaluation iterates over all workers."""


@dataclass(slots=True)
class _Order:
    """An order that its worker has not executed yet."""

    change: RoleChange
    answer_by: float


class RoleChanges:
    """Role changes. Does nothing without `--role-change`. Without a `forecaster` only measurements count."""

    def __init__(
        self,
        config: RouterConfig,
        registry: WorkerRegistry,
        send: Send,
        router_id: str,
        counters: DispatchCounters,
        forecaster: SplitForecaster | None = None,
    ) -> None:
        self._registry, self._send, self._router_id, self._counters = registry, send, router_id, counters
        self._is_on = config.role_change
        self._forecaster = forecaster if config.role_change else None
        self._policy = RolePolicy(
            RoleLimits(
                ttft_s=config.slo_ttft_ms / 1000,
                tpot_s=config.slo_tpot_ms / 1000,
                least=(config.min_prefill, config.min_decode),
                after_s=CHANGE_AFTER_S,
                interval_s=CHANGE_INTERVAL_S,
            )
        )
        self._open: dict[str, _Order] = {}
        self._num_seen = 0
        self._num_refused = Counter[Role]()
        self._forecast: SplitForecast | None = None
        self._forecast_at = -LOOK_S

    # ------------------------------------------------------------ request statistics

    def arrived(self, num_prompt: int, num_cached: int, most_output: int, now: float) -> None:
        """Count a new request, whatever its outcome."""
        if self._forecaster is not None:
            self._forecaster.arrived(num_prompt, num_cached, most_output, now)

    def turned_away(self, now: float) -> None:
        """Count a request that was rejected before its body was read."""
        if self._forecaster is not None:
            self._forecaster.turned_away(now)

    def ended(self, num_prompt: int, num_output: int) -> None:
        """Count a completed request."""
        if self._forecaster is not None:
            self._forecaster.ended(num_prompt, num_output)

    # ------------------------------------------------------------ orders

    def tick(self, now: float, num_waiting: int = 0) -> None:
        """Order role changes that are due. Called at each tick. `num_waiting` requests are on no worker."""
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
        named = {worker.load.beat.planner for worker in (*prefill, *decode) if worker.load.beat is not None}
        if self._open or named != {self._router_id}:
            return
        forecast = self._predicted(len(prefill) + len(decode), num_waiting, now)
        while (change := self._policy.choose(prefill, decode, now, forecast)) is not None:
            self._order(change, now)

    def _predicted(self, num_ready: int, num_waiting: int, now: float) -> SplitForecast | None:
        """Return the forecast for each split, at most `LOOK_S` old."""
        if self._forecaster is not None and now - self._forecast_at >= LOOK_S:
            least_of, workers = self._policy.limits.least_of, self._registry.workers.values()
            least, most = least_of("prefill"), num_ready - least_of("decode")
            self._forecast = self._forecaster.forecast(workers, num_waiting, least, most, now)
            self._forecast_at = now
        return self._forecast

    def _order(self, change: RoleChange, now: float) -> None:
        worker = self._registry.workers[change.address]
        if not self._send(change.address, ChangeRole(role=change.role, reason=change.reason)):
            return  # the policy waits for its interval and tries again
        log.info("%s: ordering role change from %s to %s: %s", worker.name, worker.role, change.role, change.reason)
        self._open[change.address] = _Order(change, now + ANSWER_S)

    def _follow(self, now: float) -> None:
        """Close the orders whose workers have changed, failed to change, or are gone."""
        for address, order in list(self._open.items()):
            worker = self._registry.workers.get(address)
            if worker is not None and worker.state is WorkerState.DRAINING:
                order.answer_by = now + ANSWER_S
            elif worker is None or worker.role == order.change.role:
                del self._open[address]
            elif now > order.answer_by:
                del self._open[address]
                why = worker.condition(now)
                log.warning("%s: did not become a %s worker in %g s: %s", worker.name, order.change.role, ANSWER_S, why)
