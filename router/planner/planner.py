"""Decides how many workers each pool should have. Pure: `now` comes in, a plan goes out.

    offered load, pools ──sizing──> needed ──growth at once, shrinking when it lasts──> bounds, budget ──> wanted

A pool grows at once, by as many as are missing. It shrinks to what sufficed, with a tenth and a half more load, for all
of the hold time, which covers the start of a worker: the gap between the two keeps it from flapping. It holds still
when it cannot see. Needs come from what clients ask for, not from queues: prompts that wait because decode workers are
full show in the decode pool's need, not in that of the prefill pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from common.wire.message_fields import Role
from router.planner.load import OfferedLoad
from router.planner.pool import Bounds, Fleet, Goals, PoolState
from router.planner.sizing import Need, Prediction, fit, parts, predict, size

KEEP_MARGIN = 1.1
"""A pool shrinks only to what holds this many times the load."""
LEAST_HOLD_S, STARTS_HELD = 90.0, 1.0
"""A need lasts for so long before a pool shrinks to it, and at least for so many starts of a worker."""
ASSUMED_START_S = 30.0
"""Before the first start was measured."""
LEAST_DRAIN_S = 30.0
"""Prompts that wait beyond the goal are to be computed within so long, or the start of a worker."""
MOST_SILENT = 0.5
"""With this share of a pool silent, what is seen of it is not believed."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`wanted` workers of those `needed` for the load; `present` serve or start. `reason`: in words and numbers."""

    wanted: int
    needed: int
    present: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`predicted`: with the workers wanted, of those that can be had. `unmet`: why the goals cannot be met, with the
    best that can be; `held`: why nothing changes although it might. "" otherwise."""

    pools: Mapping[Role, PoolPlan]
    predicted: Prediction = Prediction()
    unmet: str = ""
    held: str = ""

    def wanted(self, role: Role) -> int:
        return self.pools[role].wanted if role in self.pools else 0


@dataclass(slots=True)
class _Pool:
    """What was wanted of a pool last, and (when, needed to keep it) for as long as a need must last."""

    wanted: int
    needs: deque[tuple[float, int]]
    began: float

    def lasting(self, now: float, hold_s: float) -> int:
        """The largest need of the last `hold_s` seconds."""
        return max((num for at, num in self.needs if at > now - hold_s), default=0)

    def remember(self, now: float, num: int, for_s: float) -> None:
        self.needs.append((now, num))
        while self.needs[0][0] <= now - for_s:
            self.needs.popleft()


class Planner:
    """`idle_s`: a pool whose bounds allow none goes to zero when nothing was asked of it for so long."""

    def __init__(
        self, goals: Goals, bounds: Mapping[Role, Bounds], *, budget: float = 0.0, idle_s: float = 300.0
    ) -> None:
        self.goals, self.bounds, self.budget, self.idle_s = goals, bounds, budget, idle_s
        self._pools: dict[Role, _Pool] = {}

    def plan(self, load: OfferedLoad, fleet: Fleet, now: float) -> Plan:
        """The plan for this moment. Call it every few seconds."""
        for role, pool in fleet.pools.items():
            if role not in self._pools:
                self._pools[role] = _Pool(self.bounds[role].clamp(pool.num_present), deque(), now)
        if held := lost(fleet):
            return self._as_before(fleet, held, now)
        needs, keeps = self._needs(load, fleet)
        target = {role: self._target(role, needs[role].num, keeps[role].num, fleet, now) for role in fleet.pools}
        paid = {role: pool.num_usable for role, pool in fleet.pools.items() if pool.num_unschedulable}
        found = fit(target, self.bounds, self.budget, paid)
        pools = {}
        for role, pool in fleet.pools.items():
            before, wanted = self._pools[role].wanted, found.allowed[role]
            self._pools[role].wanted = wanted
            reason = _reason(before, wanted, target[role], needs[role])
            pools[role] = PoolPlan(wanted, needs[role].num, pool.num_present, reason)
        nums = {role: min(found.allowed[role], paid.get(role, found.allowed[role])) for role in fleet.pools}
        unmet = [need.impossible for need in needs.values() if need.impossible]
        unmet += [found.shortfall] if found.shortfall else []
        unmet += [
            f"{pool.num_unschedulable} {role} workers find no machine"
            for role, pool in fleet.pools.items()
            if pool.num_unschedulable and needs[role].num > pool.num_usable
        ]
        predicted = predict(load.at(load.rate_ahead), fleet, nums, self.goals) if _is_known(fleet) else Prediction()
        return Plan(pools, predicted, "; ".join(dict.fromkeys(unmet)))

    # ------------------------------------------------------------ inside

    def _as_before(self, fleet: Fleet, held: str, now: float) -> Plan:
        """Nothing changes, and nothing shrinks before needs were seen for long again."""
        pools = {
            role: PoolPlan(self._pools[role].wanted, self._pools[role].wanted, pool.num_present, f"held: {held}")
            for role, pool in fleet.pools.items()
        }
        for known in self._pools.values():
            known.began = now
        return Plan(pools, held=held)

    def _needs(self, load: OfferedLoad, fleet: Fleet) -> tuple[dict[Role, Need], dict[Role, Need]]:
        """What the load needs, and what a pool must need for long to shrink to it."""
        unknown = {role: self._unknown(role, pool, load, fleet) for role, pool in fleet.pools.items()}
        if not load.requests:
            return unknown, unknown
        least_rows = fleet.pools["decode"].num_held + fleet.pools["decode"].num_waiting
        more = self._late_prompts(load, fleet)
        ahead = load.at(load.rate_ahead)
        needs = size(ahead, fleet, self.goals, least_rows=least_rows, more_prompts=more)
        keeps = size(load.at(KEEP_MARGIN * load.rate_ahead), fleet, self.goals, least_rows=least_rows)
        for role, num in fleet.num_held.items():
            if num and role in needs and not needs[role].num:
                needs[role] = keeps[role] = Need(1, f"{num} requests find no worker")
        return unknown | needs, unknown | keeps

    def _unknown(self, role: Role, pool: PoolState, load: OfferedLoad, fleet: Fleet) -> Need:
        """Without a model of its steps, or of the requests, a pool that is asked for stays as it is, at least one."""
        if not fleet.num_held.get(role) and not load.rate_ahead and not pool.num_held + pool.num_waiting:
            return Need()
        return Need(max(1, self._pools[role].wanted), "nothing was measured yet")

    def _late_prompts(self, load: OfferedLoad, fleet: Fleet) -> float:
        """Prompts a second to compute beside the load, so that those that wait too long now are computed soon.

        None while the decode pool is full: then they wait for that.
        """
        if not fleet.has_prefill or fleet.pools["decode"].is_full:
            return 0.0
        remote, _ = parts(load, fleet)
        in_time = remote.rate * max(1.0, self.goals.ttft_s) + fleet.pools["prefill"].num_ready
        drain_s = max(LEAST_DRAIN_S, fleet.start_s.get("prefill", ASSUMED_START_S))
        return max(0.0, fleet.pools["prefill"].num_waiting - in_time) / drain_s

    def _target(self, role: Role, need: int, keep: int, fleet: Fleet, now: float) -> int:
        pool = self._pools[role]
        hold_s = max(LEAST_HOLD_S, STARTS_HELD * fleet.start_s.get(role, ASSUMED_START_S))
        keep = max(need, keep)
        pool.remember(now, keep, max(hold_s, self.idle_s))
        if need > pool.wanted:
            return need
        hold_s = hold_s if keep else max(hold_s, self.idle_s)
        if now - pool.began < hold_s:
            return pool.wanted
        lasting = pool.lasting(now, hold_s)
        if not lasting and pool.lasting(now, self.idle_s):
            lasting = 1
        return min(pool.wanted, lasting)


def _is_known(fleet: Fleet) -> bool:
    """Whether the steps of all pools can be predicted."""
    return all(pool.kind.is_known for pool in fleet.pools.values())


def lost(fleet: Fleet) -> str:
    """Why what is seen of the pools is not believed, or ""."""
    for role, pool in fleet.pools.items():
        if pool.num_silent and pool.num_silent >= MOST_SILENT * (pool.num_silent + pool.num_ready):
            return f"{pool.num_silent} of {pool.num_silent + pool.num_ready} {role} workers are silent"
    return ""


def _reason(before: int, wanted: int, target: int, need: Need) -> str:
    if wanted < target:
        return f"{need.binds}; bounds or budget allow {wanted}"
    if wanted > before:
        return f"grows from {before}: {need.binds}"
    if wanted < before:
        return f"shrinks from {before}: {wanted} suffice with room to spare"
    return need.binds
