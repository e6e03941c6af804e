"""Planning loop: plans every few seconds, logs changes and applies them.

LoadWindow (load from clients)  ┐
registry   (workers' reports)   ┼─> Planner ─> Plan ─> log, metrics, Scaler
StartTimes (how long starts take) ┘
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from common.config import RouterConfig
from common.machine import OwnedTask
from common.observe import REMIND_S
from common.wire import Role
from router.fleet import Worker
from router.planner.budget import Budget
from router.planner.offered_load import LoadWindow, OfferedLoad
from router.planner.planner import ASSUMED_START_S, Plan, Planner
from router.planner.pool import Bounds, Fleet, Goals, PoolObserver, StartTimes
from router.planner.scaler import Scaler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan and its inputs. `measured_s`: measured tails of TTFT and TPOT over the last minute, in seconds."""

    plan: Plan
    load: OfferedLoad
    fleet: Fleet
    measured_s: tuple[float, float] = (0.0, 0.0)


def goals_of(config: RouterConfig) -> Goals:
    """Return the goals for which pools are planned."""
    return Goals(config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3, config.slo_quantile)


def budget_of(config: RouterConfig) -> Budget:
    """Return the budget of all models of a router."""
    return Budget(config.max_cost or math.inf)


def planner_of(config: RouterConfig, budget: Budget, model: str) -> Planner:
    """Create the planner of one model."""
    bounds: dict[Role, Bounds] = {
        "prefill": Bounds(config.min_prefill, config.most("prefill"), config.price_prefill),
        "decode": Bounds(config.min_decode, config.most("decode"), config.price_decode),
    }
    return Planner(goals_of(config), bounds, budget=budget, model=model, idle_s=config.scale_to_zero_s)


def scaler_of(config: RouterConfig) -> Scaler | None:
    """Create the scaler that applies this router's plan; None if other programs read the plan. Raises ConfigError."""
    if config.planner != "kubernetes":
        return None
    # Imported lazily: no other planner needs this HTTP client.
    from router.planner.kubernetes_scaler import KubernetesScaler

    return KubernetesScaler.of(config)


class PlanLoop:
    """Runs the planner of `model`. Not thread-safe: owned by the router's event loop.

    `outlook` is the latest result, None before the first. `held` returns the number of requests without a worker, by
    role. `budget` is shared by all models.
    """

    def __init__(
        self,
        config: RouterConfig,
        window: LoadWindow,
        workers: Callable[[], Collection[Worker]],
        held: Callable[[], Mapping[str, int]],
        scaler: Scaler | None = None,
        *,
        budget: Budget | None = None,
        model: str = "",
        has_prefill: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        roles: tuple[Role, ...] = ("prefill", "decode") if has_prefill else ("decode",)
        self._config, self._window, self._workers, self._held = config, window, workers, held
        budget = budget or budget_of(config)
        self._scaler, self._clock, self._roles = scaler, clock, roles
        self._planner, self._observer = planner_of(config, budget, model), PoolObserver(roles)
        self._starts, self._model = StartTimes(ASSUMED_START_S), model
        self._unmet, self._unmet_at = "", 0.0
        self.outlook: Outlook | None = None
        self._task = OwnedTask("the planner")

    @property
    def failure(self) -> str:
        """Why the loop has ended unexpectedly; "" while it runs."""
        return self._task.failure

    def start(self) -> None:
        """Start planning periodically."""
        self._task.start(self._run())

    async def close(self) -> None:
        """Stop the loop. The pools keep their size."""
        await self._task.close()
        if self._scaler is not None:
            await self._scaler.close()

    def look(self) -> Plan:
        """Make a plan for the current state."""
        now, workers = self._clock(), self._workers()
        starts = self._starts.seconds()
        unschedulable = self._scaler.unschedulable if self._scaler is not None else {}
        fleet = Fleet(
            self._observer.observe(workers, unschedulable, now),
            self._config.local_prefill_threshold,
            starts,
            {role: self._held().get(role, 0) for role in self._roles},
            self._observer.homes(workers) if self._config.role_change else {},
        )
        own = self._window.offered(now, max(starts[role] for role in self._roles))
        times = self._observer.num_routers(workers)
        load = replace(own, rate=own.rate * times, rate_ahead=own.rate_ahead * times)
        before = self.outlook
        plan = self._planner.plan(load, fleet, now)
        for role, pool in fleet.pools.items():
            self._starts.observe(role, plan.wanted(role), fleet.homes.get(role, pool.num_ready), now)
        self.outlook = Outlook(plan, load, fleet, self._window.tails_s(now))
        self._log(None if before is None else before.plan, self.outlook)
        return plan

    async def _run(self) -> None:
        while True:
            plan = self.look()
            if self._scaler is not None and not plan.held:
                await self._scaler.scale({role: plan.wanted(role) for role in self._roles})
            await asyncio.sleep(self._config.planner_interval_s)

    def _log(self, before: Plan | None, now: Outlook) -> None:
        plan = now.plan
        for role, pool in plan.pools.items():
            if before is not None and before.wanted(role) == pool.wanted:
                continue
            fields: dict[str, object] = {"model": self._model} if self._model else {}
            fields |= {"role": role, "workers": pool.wanted, "present": pool.present}
            fields |= {"reason": pool.reason, "requests_per_s": now.load.rate_ahead}
            for name, seconds in (("ttft_ms", plan.predicted.ttft_s), ("tpot_ms", plan.predicted.tpot_s)):
                if 0.0 < seconds < math.inf:
                    fields[f"predicted_{name}"] = seconds * 1e3
            log.info("planner: wants %d %s workers", pool.wanted, role, extra=fields)
        self._log_unmet(plan.unmet)
        if plan.held != (before.held if before else ""):
            log.warning("planner: %s", f"holding the last plan: {plan.held}" if plan.held else "planning again")

    def _log_unmet(self, unmet: str) -> None:
        """Log that the goals cannot be met, at most once a minute after changes, and when they can be met again."""
        now = self._clock()
        if not unmet and self._unmet:
            log.info("planner: the goals can be met again")
            self._unmet = ""
        elif unmet != self._unmet and (not self._unmet or now - self._unmet_at >= REMIND_S):
            log.warning("planner: the goals cannot be met: %s", unmet)
            self._unmet, self._unmet_at = unmet, now
