"""Planner: decides how many workers each pool should have. Pure.

    offered load, pools ──sizing──> needed ──grow at once, shrink after the hold time──> bounds, budget ──> wanted

A pool begins at its deployed size. It grows immediately by the number of missing workers. It shrinks to the number that
sufficed for 10% more load during the whole hold time, which covers the start of a worker. The gap between the two
prevents flapping. The hold time begins again when the view of workers and load was incomplete, when this router became
the leader, and when another party set the size. Until it has passed, neither bounds nor budget make a pool smaller. The
pool does not change while workers are silent. Needs come from the offered load, not from queues: prompts that wait
because decode workers are full increase the need of the decode pool, not of the prefill pool.

With role changes, routers divide the workers between roles within seconds (`router/policy/roles.py`), and the planner
decides only their total: the sum of both needs. The number by role is then one by home role, with which a worker is
started. It changes only with the total, so that role changes do not start and stop workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.wire import Role
from router.planner.budget import Ask, Budget
from router.planner.offered_load import OfferedLoad
from router.planner.pool import Bounds, Fleet, Goals, PoolState
from router.planner.sizing import Need, Prediction, parts, predict, size

KEEP_MARGIN = 1.1
"""A pool shrinks only to a size that suffices for this multiple of the load."""
LEAST_HOLD_S, STARTS_HELD = 90.0, 1.0
"""Hold time before a pool shrinks: minimum in seconds, and in multiples of a worker's start time."""
ASSUMED_START_S = 30.0
"""Assumed start time of a worker before the first measurement, in seconds."""
LEAST_DRAIN_S = 30.0
"""Minimum time in which prompts that wait beyond the goal must be computed, in seconds. Also at least a start
time."""
MOST_SILENT = 0.5
"""Fraction of silent workers in a pool at which the plan is held."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Plan for a pool: `needed` for the load, `wanted` after bounds and budget, `present` now.

    `reason` has the numbers.
    """

    wanted: int
    needed: int
    present: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan for all pools.

    `predicted`: latencies with the wanted workers that are schedulable. `unmet`: why the goals cannot be met, and the
    best possible values. `held`: why the last plan is kept. `growth_only`: why no pool shrinks yet. All are ""
    otherwise.
    """

    pools: Mapping[Role, PoolPlan]
    predicted: Prediction = Prediction()
    unmet: str = ""
    held: str = ""
    growth_only: str = ""

    def wanted(self, role: Role) -> int:
        return self.pools[role].wanted if role in self.pools else 0


@dataclass(slots=True)
class _Pool:
    """Last wanted size of a pool, and its needs (time, workers needed to keep) over the hold time.

    `adopted` is the size that others set last, `deployed` the last known deployed size.
    """

    wanted: int
    needs: deque[tuple[float, int]]
    began: float
    adopted: int = 0
    deployed: int | None = None

    def lasting(self, now: float, hold_s: float) -> int:
        """Return the largest need of the last `hold_s` seconds."""
        return max((num for at, num in self.needs if at > now - hold_s), default=0)

    def remember(self, now: float, num: int, for_s: float) -> None:
        self.needs.append((now, num))
        while self.needs[0][0] <= now - for_s:
            self.needs.popleft()


class Planner:
    """Planner of `model`, within a `budget` that may be shared by several models.

    `idle_s`: time without requests after which a pool with a minimum of 0 is scaled to zero.
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
        self._sum: _Pool | None = None  # both pools together, with role changes
        self._began: float | None = None  # when the current view of workers and load began

    def restart(self) -> None:
        """Forget the sizes and needs of the pools. The next plan begins at the deployed sizes."""
        self._pools.clear()
        self._sum = self._began = None

    def plan(self, load: OfferedLoad, fleet: Fleet, now: float) -> Plan:
        """Return the plan for this moment. Call it every few seconds."""
        self._follow(fleet, now)
        if held := lost(fleet):
            return self._as_before(fleet, held, now)
        needs, keeps = self._needs(load, fleet)
        if fleet.homes:
            target = self._by_home(needs, keeps, fleet, now)
        else:
            self._sum = None
            target = {role: self._target(role, needs[role].num, keeps[role].num, fleet, now) for role in fleet.pools}
        paid = {role: pool.num_usable for role, pool in fleet.pools.items() if pool.num_unschedulable}
        growth_only = {role: fleet.missing or self._unobserved(role, fleet, now) for role in fleet.pools}
        bounds = {role: self._bounds(role, bool(why)) for role, why in growth_only.items()}
        found = self._budget.fit(self._model, Ask(target, bounds, paid))
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
            f"{pool.num_unschedulable} {role} workers are unschedulable"
            for role, pool in fleet.pools.items()
            if pool.num_unschedulable and needs[role].num > pool.num_usable
        ]
        predicted = predict(load.at(load.rate_ahead), fleet, nums, self.goals) if _is_known(fleet) else Prediction()
        return Plan(
            pools, predicted, "; ".join(dict.fromkeys(unmet)), growth_only=next(filter(None, growth_only.values()), "")
        )

    # ------------------------------------------------------------ inside

    def _follow(self, fleet: Fleet, now: float) -> None:
        """Adopt the sizes of new pools, and those that another party has set since the last plan."""
        begins = self._began is None or bool(fleet.missing)
        for role in fleet.pools:
            deployed, size = fleet.replicas.get(role), fleet.size(role)
            known = self._pools.get(role)
            if known is None:
                known = self._pools[role] = _Pool(size, deque(), now, size)
                begins = True
            elif deployed is None and fleet.missing:
                known.wanted, known.adopted = max(known.wanted, size), max(known.adopted, size)
            elif deployed is not None and deployed not in (known.deployed, known.wanted):
                known.wanted, known.adopted, begins = deployed, deployed, True
            known.deployed = known.deployed if deployed is None else deployed
        if begins:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin the hold times again."""
        self._began = now
        for known in (*self._pools.values(), *filter(None, (self._sum,))):
            known.began = now

    def _unobserved(self, role: Role, fleet: Fleet, now: float) -> str:
        """Return why the view has not lasted for a pool's hold time yet, or ""."""
        hold_s, seen_s = _hold_s(role, fleet), now - (now if self._began is None else self._began)
        return f"the load has been observed for {seen_s:.0f} s of {hold_s:.0f} s" if seen_s < hold_s else ""

    def _bounds(self, role: Role, growth_only: bool) -> Bounds:
        """Return the bounds of a pool, raised to the size that it began with if it must not shrink."""
        bounds, known = self.bounds[role], self._pools[role]
        floor = min(known.adopted, known.wanted) if growth_only else 0
        return replace(bounds, least=max(bounds.least, floor), most=max(bounds.most, floor))

    def _as_before(self, fleet: Fleet, held: str, now: float) -> Plan:
        """Return the last plan unchanged, and restart the hold time."""
        pools = {
            role: PoolPlan(self._pools[role].wanted, self._pools[role].wanted, pool.num_present, f"held: {held}")
            for role, pool in fleet.pools.items()
        }
        self._begin(now)
        return Plan(pools, held=held)

    def _needs(self, load: OfferedLoad, fleet: Fleet) -> tuple[dict[Role, Need], dict[Role, Need]]:
        """Return what the load needs, and the need that must last before a pool shrinks to it."""
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
                needs[role] = keeps[role] = Need(1, f"{num} requests have no {role} worker")
        return unknown | needs, unknown | keeps

    def _unknown(self, role: Role, pool: PoolState, load: OfferedLoad, fleet: Fleet) -> Need:
        """Return the need of a pool without a step model or sampled requests: its last size, at least one if in use."""
        if not fleet.num_held.get(role) and not load.rate_ahead and not pool.num_held + pool.num_waiting:
            return Need()
        return Need(max(1, self._pools[role].wanted), "no measurements yet")

    def _late_prompts(self, load: OfferedLoad, fleet: Fleet) -> float:
        """Return additional prompts per second, so that prompts that wait too long now are computed soon.

        0 while the decode pool is full, because then they wait for it.
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
        """Return the wanted workers by home role. Only a change of the total changes them, by surplus or shortage."""
        wanted = {role: self._pools[role].wanted for role in fleet.pools}
        for known in self._pools.values():
            known.began = now  # if roles are fixed later, restart the hold time of needs by role
        if self._sum is None:
            self._sum = _Pool(0, deque(), now)
        self._sum.wanted = sum(wanted.values())
        hold_s = max(_hold_s(role, fleet) for role in fleet.pools)
        need, keep = (sum(one.num for one in each.values()) for each in (needs, keeps))
        total = self._lasting(self._sum, need, keep, hold_s, now)
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
        return self._lasting(self._pools[role], need, keep, _hold_s(role, fleet), now)

    def _lasting(self, pool: _Pool, need: int, keep: int, hold_s: float, now: float) -> int:
        """Return the wanted size: a larger need immediately, a smaller one after the hold time."""
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


def _hold_s(role: Role, fleet: Fleet) -> float:
    """Return the hold time before a pool shrinks, in seconds."""
    return max(LEAST_HOLD_S, STARTS_HELD * fleet.most_start_s(role))


def _shared(needs: Mapping[Role, Need]) -> Need:
    """Combine the needs of both pools for a reason."""
    said = [f"{need.num} to {role} ({need.binds})" for role, need in needs.items()]
    return Need(sum(need.num for need in needs.values()), f"workers with changing roles: {', '.join(said)}")


def _divided(total: int, needs: Mapping[Role, Need]) -> dict[Role, int]:
    """Divide `total` workers between the roles in proportion to their needs."""
    need = sum(one.num for one in needs.values())
    num_prefill = round(total * needs["prefill"].num / need) if need and "prefill" in needs else 0
    return {"prefill": num_prefill, "decode": total - num_prefill}


def _is_known(fleet: Fleet) -> bool:
    """Return whether the steps of all pools can be predicted."""
    return all(pool.kind.is_known for pool in fleet.pools.values())


def lost(fleet: Fleet) -> str:
    """Return why the current view of the pools is unreliable, or ""."""
    for role, pool in fleet.pools.items():
        if pool.num_silent and pool.num_silent >= MOST_SILENT * (pool.num_silent + pool.num_ready):
            return f"{pool.num_silent} of {pool.num_silent + pool.num_ready} {role} workers are silent"
    return ""


def _reason(before: int, wanted: int, target: int, need: Need) -> str:
    if wanted < target:
        return f"{need.binds}; limited to {wanted} by bounds or budget"
    if wanted > before:
        return f"grows from {before}: {need.binds}"
    if wanted < before:
        return f"shrinks from {before}: {wanted} workers suffice with a margin"
    return need.binds
