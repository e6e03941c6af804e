"""What may control the pools of `world`: the planner, rules that are in use, and one who knows the future."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.planner.world import CONTROL_S, Request, Seen
from common.latency.step_model import StepShape
from common.wire.message_fields import ROLES, Role
from router.planner.offered_load import LoadWindow, OfferedLoad, SampledRequest
from router.planner.planner import Plan, Planner
from router.planner.pool import Bounds, Fleet, Goals, PoolState, WorkerKind
from router.planner.sizing import size


@dataclass
class Planned:
    """The planner, fed as the router feeds it."""

    planner: Planner
    window: LoadWindow = field(default_factory=LoadWindow)
    plans: list[Plan] = field(default_factory=list)

    def __call__(self, seen: Seen) -> Mapping[Role, int]:
        at = seen.now - CONTROL_S / 2
        if seen.arrived:
            self.window.arrived(at, seen.arrived)
        for request in seen.ended:
            self.window.ended(request.shape, at)
        for request in seen.refused:
            self.window.refused(request.shape.num_prompt, at)
        load = self.window.offered(seen.now, max(seen.fleet.start_s.values()))
        self.plans.append(self.planner.plan(load, seen.fleet, seen.now))
        return {role: self.plans[-1].wanted(role) for role in ROLES}


@dataclass
class Utilisation:
    """An HPA on utilisation: time that prefill computes, KV blocks that decode holds; 60 % of each.

    The algorithm of Kubernetes: ceil(number x used / target), 10 % tolerance, a look every 15 s, the most of the last
    five minutes before it shrinks.
    """

    bounds: Mapping[Role, Bounds]
    target: float = 0.6
    _recent: dict[Role, deque[float]] = field(default_factory=lambda: {role: deque(maxlen=12) for role in ROLES})
    _wishes: dict[Role, deque[int]] = field(default_factory=lambda: {role: deque(maxlen=20) for role in ROLES})
    _looks: int = 0
    _wanted: dict[Role, int] = field(default_factory=dict)

    def __call__(self, seen: Seen) -> Mapping[Role, int]:
        self._looks += 1
        for role in ROLES:
            pool = seen.fleet.pools[role]
            used = seen.busy[role] / max(1, pool.num_ready)
            if role == "decode":
                used = pool.num_held / max(1, pool.num_ready * pool.kind.max_num_seqs)
            self._recent[role].append(used)
            if self._looks % 3 == 0 or role not in self._wanted:
                self._look(role, seen.present[role], pool.num_ready)
        return dict(self._wanted)

    def _look(self, role: Role, present: int, num_ready: int) -> None:
        used = sum(self._recent[role]) / len(self._recent[role])
        ratio = used / self.target
        wish = present if abs(ratio - 1.0) <= 0.1 else math.ceil(num_ready * ratio)
        self._wishes[role].append(self.bounds[role].clamp(max(1, wish)))
        wish = self._wishes[role][-1]
        self._wanted[role] = wish if wish > present else min(present, max(self._wishes[role]))


@dataclass
class Threshold:
    """One more worker while more than five requests wait for each, one fewer after five minutes without; decode the
    same at 80 % of its places."""

    bounds: Mapping[Role, Bounds]
    waiting_each: float = 5.0
    places: float = 0.8
    calm_s: float = 300.0
    _busy_at: dict[Role, float] = field(default_factory=dict)
    _changed_at: dict[Role, float] = field(default_factory=dict)

    def __call__(self, seen: Seen) -> Mapping[Role, int]:
        wanted = dict(seen.present)
        for role in ROLES:
            pool = seen.fleet.pools[role]
            used = pool.num_waiting / max(1, pool.num_ready) / self.waiting_each
            if role == "decode":
                used = max(used, pool.num_held / max(1, pool.num_ready * pool.kind.max_num_seqs) / self.places)
            if used > 0.5:
                self._busy_at[role] = seen.now
            since = seen.now - self._changed_at.get(role, -math.inf)
            calm = seen.now - max(self._busy_at.get(role, 0.0), self._changed_at.get(role, 0.0))
            step = 1 if used > 1.0 and since >= 15.0 else -1 if calm >= self.calm_s else 0
            wanted[role] = self.bounds[role].clamp(max(1, wanted[role] + step))
            if wanted[role] != seen.present[role]:
                self._changed_at[role] = seen.now
        return wanted


@dataclass
class Interpolating:
    """Dynamo's throughput-based planner, after its published design (docs.nvidia.com/dynamo, "Planner Design", 0.9).

    Every 180 s it takes the interval's requests and mean lengths to be the next interval's ("constant" predictor).
    Prefill: prompt tokens a second, times TTFT over that of a lone prompt where that is below 1, over the tokens a
    second of a profiled worker. Decode: output tokens a second over what a profiled worker makes at the largest batch
    whose step keeps the TPOT goal, which is divided by measured over expected TPOT. Without requests it changes
    nothing. Its profile is the workers' true model here. It knows neither queueing nor the time that a start takes.
    """

    goals: Goals
    bounds: Mapping[Role, Bounds]
    interval_s: float = 180.0
    _since: float = 0.0
    _num: int = 0
    _ended: list[Request] = field(default_factory=list)
    _wanted: dict[Role, int] = field(default_factory=dict)

    def __call__(self, seen: Seen) -> Mapping[Role, int]:
        self._num += seen.arrived
        self._ended += seen.ended
        wanted = self._wanted or dict(seen.present)
        if seen.now - self._since >= self.interval_s:
            if self._ended and self._num:
                wanted = {
                    "prefill": self._prefill(seen.fleet.pools["prefill"].kind),
                    "decode": self._decode(seen.fleet.pools["decode"]),
                }
            self._since, self._num, self._ended = seen.now, 0, []
        self._wanted = {role: self.bounds[role].clamp(max(1, num)) for role, num in wanted.items()}
        return dict(self._wanted)

    def _mean(self, value: Callable[[Request], float]) -> float:
        return sum(map(value, self._ended)) / len(self._ended)

    def _prefill(self, kind: WorkerKind) -> int:
        num_prompt = self._mean(lambda one: one.shape.num_prompt)
        alone_s = kind.model.steps_s(StepShape.of_prompt(0, round(num_prompt)), kind.step_tokens)
        correction = min(1.0, self._mean(lambda one: one.ttft_s) / alone_s)
        return math.ceil(self._num / self.interval_s * correction * alone_s)

    def _decode(self, pool: PoolState) -> int:
        kind, num_output = pool.kind, self._mean(lambda one: one.shape.num_output)
        context = self._mean(lambda one: one.shape.num_prompt) + num_output / 2
        most_rows = min(kind.max_num_seqs, max(1, int(kind.num_blocks * kind.block_size / context)))

        def step_s(rows: int) -> float:
            return kind.model.seconds(StepShape.of_rows(rows, round(rows * context)))

        duration_s = self._mean(lambda one: one.ttft_s + one.tpot_s * (one.shape.num_output - 1))
        seen_rows = self._num * duration_s / self.interval_s / max(1, pool.num_ready)
        correction = self._mean(lambda one: one.tpot_s) / step_s(max(1, round(seen_rows)))
        goal_s, rows = self.goals.tpot_s / max(1e-9, correction), 1
        while rows < most_rows and step_s(rows + 1) <= goal_s:
            rows += 1
        return math.ceil(self._num * num_output / self.interval_s / (rows / step_s(rows)))


@dataclass
class Saturation:
    """The saturation rule of llm-d's workload-variant-autoscaler (its docs/saturation-scaling-config.md, 0.7).

    A replica is saturated at 80 % of its KV or 5 waiting requests. One more while the mean spare KV of the others is
    below 10 %, or their spare queue below 3; none while one is pending. One fewer where the load, spread over the rest,
    would not ask for one more. It looks once a minute. Means of a pool stand for each replica here.
    """

    bounds: Mapping[Role, Bounds]
    interval_s: float = 60.0
    most_kv: float = 0.8
    most_waiting: float = 5.0
    spare_kv: float = 0.1
    spare_waiting: float = 3.0
    _wanted: dict[Role, int] = field(default_factory=dict)

    def __call__(self, seen: Seen) -> Mapping[Role, int]:
        if not self._wanted or seen.now % self.interval_s == 0:
            self._wanted = {role: self._look(role, seen) for role in ROLES}
        return dict(self._wanted)

    def _look(self, role: Role, seen: Seen) -> int:
        pool, present = seen.fleet.pools[role], seen.present[role]
        num, kv = max(1, pool.num_ready), seen.kv[role]
        wanted = present
        if self._asks_for_more(kv, pool.num_waiting / num):
            wanted = present + (0 if pool.num_starting else 1)
        elif num > 1 and not self._asks_for_more(kv * num / (num - 1), pool.num_waiting / (num - 1)):
            wanted = present - 1
        return self.bounds[role].clamp(max(1, wanted))

    def _asks_for_more(self, kv: float, waiting: float) -> bool:
        return self.most_kv - kv < self.spare_kv or self.most_waiting - waiting < self.spare_waiting


class Clairvoyant:
    """Knows the rate at every moment, the requests' lengths and how long a start takes, and orders workers so early.

    Workers suffice for the largest rate of the minute that begins when they are ready.
    """

    def __init__(
        self,
        rate: Callable[[float], float],
        sample: tuple[SampledRequest, ...],
        goals: Goals,
        bounds: Mapping[Role, Bounds],
        fleet: Fleet,
    ) -> None:
        self._rate, self._sample, self._goals, self._bounds, self._fleet = rate, sample, goals, bounds, fleet
        self._known: dict[float, dict[Role, int]] = {}

    def __call__(self, seen: Seen) -> Mapping[Role, int]:
        wanted: dict[Role, int] = {}
        for role in ROLES:
            ready_at = seen.now + self._fleet.start_s[role]
            moments = [seen.now, *(ready_at + ahead for ahead in range(0, 60, 10))]
            wanted[role] = max(self.needed(at)[role] for at in [*moments, (seen.now + ready_at) / 2])
        return wanted

    def needed(self, at: float) -> dict[Role, int]:
        """The workers that suffice for the rate of this moment."""
        rate = round(self._rate(at), 1)
        if rate not in self._known:
            load = OfferedLoad(rate, rate, 1.0, self._sample)
            needs = size(load, self._fleet, self._goals)
            self._known[rate] = {role: self._bounds[role].clamp(need.num) for role, need in needs.items()}
        return self._known[rate]


@dataclass(frozen=True)
class Seeing:
    """Knows exactly what the rate of `late_s` seconds ago needs, and nothing of what comes: has no foresight."""

    known: Clairvoyant
    late_s: float = 0.0

    def __call__(self, seen: Seen) -> Mapping[Role, int]:
        return self.known.needed(max(0.0, seen.now - self.late_s))
