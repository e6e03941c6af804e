"""Decides how many workers each pool should have. Pure: `now` comes in, a plan goes out.

    offered load, pools ──sizing──> needed ──growth at once, shrinking when it lasts──> bounds, budget ──> wanted

A pool grows at once, by as many as are missing. It shrinks to what sufficed, with a tenth and a half more load, for all
of the hold time, which covers the start of a worker: the gap between the two keeps it from flapping. It holds still
when it cannot see. Needs come from what clients ask for, not from queues: prompts that wait because decode workers are
full show in the decode pool's need, not in that of the prefill pool.

Where workers change their roles, routers divide them in seconds (`router/policy/roles.py`), and the planner owns how
many there are: it sizes the sum of both needs. A number by role is then one by home, the role with which a worker is
started; it changes only with the sum, so no worker is started and another ended for what a change of role does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from common.wire import Role
from router.planner.budget import Ask, Budget
from router.planner.offered_load import OfferedLoad
from router.planner.pool import Bounds, Fleet, Goals, PoolState
from router.planner.sizing import Need, Prediction, parts, predict, size

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
    """The number of workers wanted of a pool last, and (when, needed to keep it) for as long as a need must last."""

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
    """`idle_s`: a pool whose bounds allow none goes to zero when nothing was asked of it for so long.

    The `budget` may be that of several models, of which this planner's is `model`.
    """

    def __init__(
        self,
        goals: Goals,
        bounds: Mapping[Role, Bounds],
        *,
        budget: Budget | None = None,
        model: str = "",
        idle_s: float = 300.0,
    ) -> None:
        self.goals, self.bounds, self.idle_s = goals, bounds, idle_s
        self._budget, self._model = budget or Budget(), model
        self._pools: dict[Role, _Pool] = {}
        self._sum: _Pool | None = None  # of both pools, while their workers change roles

    def plan(self, load: OfferedLoad, fleet: Fleet, now: float) -> Plan:
        """The plan for this moment. Call it every few seconds."""
        for role, pool in fleet.pools.items():
            if role not in self._pools:
                present = fleet.homes[role] + pool.num_starting if fleet.homes else pool.num_present
                self._pools[role] = _Pool(self.bounds[role].clamp(present), deque(), now)
        if held := lost(fleet):
            return self._as_before(fleet, held, now)
        needs, keeps = self._needs(load, fleet)
        if fleet.homes:
            target = self._by_home(needs, keeps, fleet, now)
        else:
            self._sum = None
            target = {role: self._target(role, needs[role].num, keeps[role].num, fleet, now) for role in fleet.pools}
        paid = {role: pool.num_usable for role, pool in fleet.pools.items() if pool.num_unschedulable}
        found = self._budget.fit(self._model, Ask(target, self.bounds, paid))
        pools = {}
        for role, pool in fleet.pools.items():
            before, wanted = self._pools[role].wanted, found.allowed[role]
            self._pools[role].wanted = wanted
            reason = _reason(before, wanted, target[role], _shared(needs) if fleet.homes else needs[role])
            pools[role] = PoolPlan(wanted, needs[role].num, pool.num_present, reason)
        nums = {role: min(found.allowed[role], paid.get(role, found.allowed[role])) for role in fleet.pools}
        if fleet.homes:
            nums = _divided(sum(nums.values()), needs)
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
        if self._sum is not None:
            self._sum.began = now
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

    def _by_home(
        self, needs: Mapping[Role, Need], keeps: Mapping[Role, Need], fleet: Fleet, now: float
    ) -> dict[Role, int]:
        """The sum of both pools, by home: changed where it changes, at the home of the role that has least or most."""
        wanted = {role: self._pools[role].wanted for role in fleet.pools}
        for known in self._pools.values():
            known.began = now  # if roles are pinned again, nothing shrinks before needs by role were seen for long
        if self._sum is None:
            self._sum = _Pool(0, deque(), now)
        self._sum.wanted = sum(wanted.values())
        start_s = max(fleet.start_s.get(role, ASSUMED_START_S) for role in fleet.pools)
        need, keep = (sum(one.num for one in each.values()) for each in (needs, keeps))
        total = self._lasting(self._sum, need, keep, start_s, now)
        while sum(wanted.values()) < total:
            room = [role for role in wanted if wanted[role] < self.bounds[role].most] or list(wanted)
            wanted[max(room, key=lambda role: needs[role].num - wanted[role])] += 1
        while sum(wanted.values()) > total:
            spare = [role for role in wanted if wanted[role] > self.bounds[role].least]
            if not spare:
                break
            wanted[min(spare, key=lambda role: needs[role].num - wanted[role])] -= 1
        return wanted

    def _target(self, role: Role, need: int, keep: int, fleet: Fleet, now: float) -> int:
        return self._lasting(self._pools[role], need, keep, fleet.start_s.get(role, ASSUMED_START_S), now)

    def _lasting(self, pool: _Pool, need: int, keep: int, start_s: float, now: float) -> int:
        """What to want of a pool: the need at once if it is larger, what sufficed for long if it is smaller."""
        hold_s = max(LEAST_HOLD_S, STARTS_HELD * start_s)
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


def _shared(needs: Mapping[Role, Need]) -> Need:
    """The needs of both pools as one, for a reason."""
    said = [f"{need.num} to {role} ({need.binds})" for role, need in needs.items()]
    return Need(sum(need.num for need in needs.values()), f"workers that change roles are needed: {', '.join(said)}")


def _divided(total: int, needs: Mapping[Role, Need]) -> dict[Role, int]:
    """So many workers in roles, in the ratio of what both pools need."""
    need = sum(one.num for one in needs.values())
    num_prefill = round(total * needs["prefill"].num / need) if need and "prefill" in needs else 0
    return {"prefill": num_prefill, "decode": total - num_prefill}


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
