"""Plans every few seconds, logs what changes, and has it carried out.

LoadWindow (what clients ask) ┐
registry   (what workers say) ┼─> Planner ─> Plan ─> log, metrics, Scaler
StartTimes (how late they are) ┘
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
    """One look: the plan and what it was made of. Tails in seconds, `measured` over the last minute."""

    plan: Plan
    load: OfferedLoad
    fleet: Fleet
    measured_s: tuple[float, float] = (0.0, 0.0)


def goals_of(config: RouterConfig) -> Goals:
    """The goals that pools are planned for."""
    return Goals(config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3, config.slo_quantile)


def budget_of(config: RouterConfig) -> Budget:
    """The budget of all models of a router."""
    return Budget(config.max_cost or math.inf)


def planner_of(config: RouterConfig, budget: Budget, model: str) -> Planner:
    """The planner of one model, whose settings these are."""
    bounds: dict[Role, Bounds] = {
        "prefill": Bounds(config.min_prefill, config.most("prefill"), config.price_prefill),
        "decode": Bounds(config.min_decode, config.most("decode"), config.price_decode),
    }
    return Planner(goals_of(config), bounds, budget=budget, model=model, idle_s=config.scale_to_zero_s)


def scaler_of(config: RouterConfig) -> Scaler | None:
    """The scaler that carries out this router's plan; None where other programs read the plan. Raises ConfigError."""
    if config.planner != "kubernetes":
        return None
    # Imported here, because no other router needs this HTTP client.
    from router.planner.kubernetes_scaler import KubernetesScaler

    return KubernetesScaler.of(config)


class PlanLoop:
    """Owned by the router's event loop. `outlook` is the latest look; None before the first.

    `held` says how many requests find no worker of each role. `budget` is that of all models, of which this is `model`.
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
        """Why the loop has ended although it never should; "" while it runs."""
        return self._task.failure

    def start(self) -> None:
        """Look now and then from now on."""
        self._task.start(self._run())

    async def close(self) -> None:
        """End the loop; the pools stay as they are."""
        await self._task.close()
        if self._scaler is not None:
            await self._scaler.close()

    def look(self) -> Plan:
        """Make a plan of what is seen now."""
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
            log.info("the plan wants workers", extra=fields)
        self._log_unmet(plan.unmet)
        if plan.held != (before.held if before else ""):
            log.warning("the plan %s", f"is held: {plan.held}" if plan.held else "is made again")

    def _log_unmet(self, unmet: str) -> None:
        """Say that the goals cannot be met, again when the numbers have changed, once a minute; and the end of it."""
        now = self._clock()
        if not unmet and self._unmet:
            log.info("the goals can be met again")
            self._unmet = ""
        elif unmet != self._unmet and (not self._unmet or now - self._unmet_at >= REMIND_S):
            log.warning("the goals cannot be met: %s", unmet)
            self._unmet, self._unmet_at = unmet, now
