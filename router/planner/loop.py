"""Planning loop: plans every few seconds, logs changes and applies them.

LoadWindow (load from clients)    ┐
registry   (workers' reports)     │
Scaler     (deployed sizes)       ┼─> Planner ─> Plan ─> log, metrics, Scaler
StartTimes (how long starts take) ┘

After a start the loop knows neither workers nor load, and would take a busy pool for an idle one. So pools only grow
until discovery has listed the workers, they are ready, and a whole hold time of load has been seen.
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
from router.planner.planner import ASSUMED_START_S, LEAST_HOLD_S, Plan, Planner
from router.planner.pool import Bounds, Fleet, Goals, PoolObserver, StartTimes, StartupCheck
from router.planner.scaler import DeployedPools, Scaler

log = logging.getLogger(__name__)

YIELD_S = 60.0
"""Time without load after which a leader yields to the routers that serve all requests, in seconds."""


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
    role. `budget` is shared by all models. `is_listed` returns whether discovery has listed the workers. While
    `is_leaving` returns True, this router leaves the pools to others.
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
        is_listed: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        roles: tuple[Role, ...] = ("prefill", "decode") if has_prefill else ("decode",)
        self._config, self._window, self._workers, self._held = config, window, workers, held
        budget = budget or budget_of(config)
        self._scaler, self._clock, self._roles = scaler, clock, roles
        self._planner, self._observer = planner_of(config, budget, model), PoolObserver(roles)
        self._starts, self._model = StartTimes(), model
        self._startup, self._known_at, self._is_listed = StartupCheck(), 0.0, is_listed
        self._deployed, self._term = DeployedPools(), -1
        self._loaded_at = clock()  # when this router last served a share of the requests, or there were none
        self.is_leaving: Callable[[], bool] = lambda: False
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

    async def round(self) -> None:
        """Read the deployed sizes, make a plan, and apply it if this router leads. Other routers only wake pools."""
        scaler = self._scaler
        if scaler is None:
            self.look()
            return
        if self.is_leaving():
            await scaler.resign()
        deployed = await scaler.deployed()
        if deployed is not None:
            self._deployed = deployed
            if deployed.term not in (None, self._term):
                self._planner.restart()  # the leader before has changed the sizes, and may have seen other load
                self._term = deployed.term
        plan = self.look()
        if deployed is None or plan.held:
            return
        if deployed.term is not None and self._clock() - self._loaded_at > YIELD_S:
            log.info("planner: yields the lead, because other routers serve nearly all requests")
            self._loaded_at = self._clock()
            await scaler.yield_lead()
        elif deployed.term is not None:
            await scaler.scale({role: plan.wanted(role) for role in self._roles})
        else:  # the leader does not know the requests that wait here
            held = self._held()
            await scaler.wake([role for role in self._roles if held.get(role) and plan.wanted(role)])

    def look(self) -> Plan:
        """Make a plan for the current state."""
        now, workers = self._clock(), self._workers()
        fleet = Fleet(
            self._observer.observe(workers, self._deployed.unschedulable, now),
            self._config.local_prefill_threshold,
            self._start_s(),
            {role: self._held().get(role, 0) for role in self._roles},
            self._observer.homes(workers) if self._config.role_change else {},
            self._deployed.replicas,
        )
        times = self._observer.num_routers(workers)
        missing = self._missing(fleet, now)
        is_new = bool(missing) or now - self._known_at < LEAST_HOLD_S
        # As requests move to a new router, its rate seems to rise, and its share of all requests is still small.
        ahead_s = 0.0 if is_new else max(fleet.start_s.get(role, ASSUMED_START_S) for role in self._roles)
        own = self._window.offered(now, ahead_s)
        if math.isinf(times) or (times > 1.0 and not own.rate):
            missing = missing or "other routers serve nearly all requests"
        else:
            self._loaded_at = now
        factor = 1.0 if is_new or math.isinf(times) else times
        load = replace(own, rate=own.rate * factor, rate_ahead=own.rate_ahead * factor)
        fleet = replace(fleet, missing=missing)
        before = self.outlook
        plan = self._planner.plan(load, fleet, now)
        if not missing:
            for role, pool in fleet.pools.items():
                self._starts.observe(role, plan.wanted(role), fleet.homes.get(role, pool.num_ready), now)
        self.outlook = Outlook(plan, load, fleet, self._window.tails_s(now))
        self._log(None if before is None else before.plan, self.outlook)
        return plan

    def _missing(self, fleet: Fleet, now: float) -> str:
        """Return what this router does not know yet after its start, "" if it knows everything."""
        if self._scaler is not None and not self._deployed.replicas:
            return "the deployed sizes of the pools are not known yet"
        if not self._startup.is_complete:
            self._known_at = now
        return self._startup.missing(self._is_listed(), fleet, now)

    def _start_s(self) -> dict[Role, float]:
        """Return the known start times by role. On one machine, the assumed one before the first measurement."""
        assumed = dict.fromkeys(self._roles, ASSUMED_START_S) if self._scaler is None else {}
        return assumed | self._starts.seconds()

    async def _run(self) -> None:
        while True:
            await self.round()
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
        if bool(plan.growth_only) != bool(before and before.growth_only):
            reason = f"pools only grow: {plan.growth_only}" if plan.growth_only else "pools may shrink"
            log.info("planner: %s", reason)

    def _log_unmet(self, unmet: str) -> None:
        """Log that the goals cannot be met, at most once a minute after changes, and when they can be met again."""
        now = self._clock()
        if not unmet and self._unmet:
            log.info("planner: the goals can be met again")
            self._unmet = ""
        elif unmet != self._unmet and (not self._unmet or now - self._unmet_at >= REMIND_S):
            log.warning("planner: the goals cannot be met: %s", unmet)
            self._unmet, self._unmet_at = unmet, now
