"""Two pools in virtual time under a planner: requests arrive, wait, decode; workers start late and leave.

Prompts wait in one queue for the prefill worker that is free first, and then, where all decode workers are full, hold
their memory. Decode workers compute steps of all their sequences. A request that would wait longer than the TTFT goal
is refused, as the router refuses it. Steps take what a `StepModel` says; tokens advance in ticks.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.latency.step_model import StepShape
from common.wire.message_fields import ROLES, Role
from router.planner.forecast import alone_s, packed_s
from router.planner.offered_load import SampledRequest
from router.planner.pool import Fleet, Goals, PoolState, WorkerKind

TICK_S, CONTROL_S = 0.5, 5.0
MOST_BLOCKS = 0.95
"""Of a worker's KV blocks that sequences may own when another one is admitted."""


@dataclass(eq=False, slots=True)
class Request:
    """Times in virtual seconds; `ttft_s` is infinite for a refused one. `left`: tokens to come."""

    arrived_at: float
    shape: SampledRequest
    first_at: float = 0.0
    ttft_s: float = math.inf
    tpot_s: float = 0.0
    left: float = 0.0

    @property
    def context(self) -> float:
        return self.shape.num_prompt + self.shape.num_output - self.left


@dataclass(eq=False, slots=True)
class Machine:
    """A worker: it serves from `ready_at` on. A prefill worker is busy until `free_at`; a decode worker has `rows`."""

    ready_at: float
    free_at: float = 0.0
    leaving: bool = False
    rows: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)  # computed, not taken by a decode worker

    def num_blocks(self, kind: WorkerKind) -> float:
        return sum(math.ceil((row.context + row.left) / kind.block_size) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a controller sees: the pools, and what happened since it looked last.

    `kv`: the share of a pool's KV blocks that requests own.
    """

    now: float
    fleet: Fleet
    arrived: int
    ended: Sequence[Request]
    refused: Sequence[Request]
    busy: Mapping[Role, float]
    present: Mapping[Role, int]
    kv: Mapping[Role, float]


Controller = Callable[[Seen], Mapping[Role, int]]


@dataclass(frozen=True, slots=True)
class Result:
    """`met`: share of requests that met both goals. `worker_s`: by role, from the order of a worker to its end.

    `history`: what was wanted at each look of the controller, `ready` how many served then.
    """

    met: float
    refused: float
    worker_s: Mapping[Role, float]
    history: Sequence[Mapping[Role, int]]
    ready: Sequence[Mapping[Role, int]] = ()

    @property
    def cost(self) -> float:
        return sum(self.worker_s.values())

    def changes(self, role: Role) -> int:
        nums = [wanted[role] for wanted in self.history]
        return sum(a != b for a, b in zip(nums, nums[1:], strict=False))

    def turns(self, role: Role) -> int:
        """How often growing and shrinking took turns."""
        nums = [wanted[role] for wanted in self.history]
        signs = [b > a for a, b in zip(nums, nums[1:], strict=False) if a != b]
        return sum(a != b for a, b in zip(signs, signs[1:], strict=False))


class World:
    """`most`: so many workers of a role find a machine; others stay unscheduled. `silent`: spans without heartbeats."""

    def __init__(
        self,
        requests: Iterable[Request],
        kinds: Mapping[Role, WorkerKind],
        goals: Goals,
        controller: Controller,
        *,
        start: Mapping[Role, int],
        start_s: float = 30.0,
        threshold: int = 64,
        most: Mapping[Role, int] | None = None,
        silent: Sequence[tuple[float, float]] = (),
        noise: float = 0.04,
        seed: int = 0,
    ) -> None:
        self.kinds, self.goals, self.controller = kinds, goals, controller
        self.threshold, self.start_s, self.silent = threshold, start_s, silent
        self.most = dict.fromkeys(ROLES, 1 << 30) | dict(most or {})
        self.machines: dict[Role, list[Machine]] = {role: [Machine(0.0) for _ in range(start[role])] for role in ROLES}
        self.wanted = dict(start)
        self.coming = deque(sorted(requests, key=lambda request: request.arrived_at))
        self.all = list(self.coming)
        self.waiting: deque[Request] = deque()
        self.computed: list[tuple[float, int, Request, Machine]] = []
        self.done: list[Request] = []
        self.refused: list[Request] = []
        self.worker_s: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        self.busy_s: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        self.history: list[dict[Role, int]] = []
        self.ready: list[dict[Role, int]] = []
        self._looked = (0, 0, 0)
        self._chance = random.Random(seed)
        self._noise, self._serial, self._num_arrived = noise, 0, 0

    def run(self, seconds: float) -> Result:
        """Serve until `seconds`."""
        for tick in range(int(seconds / TICK_S)):
            self.step((tick + 1) * TICK_S)
        return self.result(seconds)

    def step(self, now: float) -> None:
        """Serve for one tick, which ends `now`."""
        while self.coming and self.coming[0].arrived_at <= now:
            self._num_arrived += 1
            self._admit(self.coming.popleft())
        self._prefill(now)
        self._decode(now)
        self._leave(now)
        if now % CONTROL_S == 0:
            self._control(now)

    def result(self, seconds: float) -> Result:
        """What became of the requests after so long; those that are not done count by what they got."""
        judged = [one for one in self.all if one.arrived_at < seconds - 60.0]
        met = sum(self.meets(one) for one in judged) / max(1, len(judged))
        return Result(met, len(self.refused) / max(1, len(self.all)), self.worker_s, self.history, self.ready)

    def meets(self, one: Request) -> bool:
        goals = self.goals
        return (not goals.ttft_s or one.ttft_s <= goals.ttft_s) and (not goals.tpot_s or one.tpot_s <= goals.tpot_s)

    def _ready(self, role: Role, now: float) -> list[Machine]:
        return [each for each in self.machines[role] if each.ready_at <= now and not each.leaving]

    # ------------------------------------------------------------ requests

    def _admit(self, request: Request) -> None:
        """Refuse a request that would wait longer than the goal behind others."""
        ready = self._ready("prefill", request.arrived_at)
        if self.goals.ttft_s and ready and self.waiting:
            kind = self.kinds["prefill"]
            queued_s = sum(packed_s(kind, one.shape) for one in self.waiting) / len(ready)
            queued_s += max(0.0, min(each.free_at for each in ready) - request.arrived_at)
            if queued_s > self.goals.ttft_s:
                self.refused.append(request)
                return
        self.waiting.append(request)

    def _prefill(self, now: float) -> None:
        """Prompts begin on the worker that is free first, while it has memory for them."""
        kind = self.kinds["prefill"]
        ready = self._ready("prefill", now)
        while self.waiting:
            request = self.waiting[0]
            local = request.shape.num_uncached <= self.threshold or not ready
            pool = self._ready("decode", now) if local else ready
            able = [each for each in pool if local or self._has_memory(each, request)]
            if not able:
                return
            machine = min(able, key=lambda each: each.free_at)
            began = max(machine.free_at, request.arrived_at, machine.ready_at)
            if began > now:
                return
            shape = self.kinds["decode"] if local else kind
            full = len(self.waiting) > len(pool)
            own_s = packed_s(shape, request.shape) if full else alone_s(shape, request.shape)
            own_s *= self._chance.gauss(1.0, self._noise)
            self.waiting.popleft()
            machine.free_at = began + own_s
            self.busy_s["decode" if local else "prefill"] += own_s
            request.first_at = began + max(own_s, alone_s(shape, request.shape))
            request.ttft_s = request.first_at - request.arrived_at
            machine.held.append(request)
            self._serial += 1
            heapq.heappush(self.computed, (request.first_at, self._serial, request, machine))

    def _has_memory(self, machine: Machine, request: Request) -> bool:
        kind = self.kinds["prefill"]
        held = sum(one.shape.num_prompt for one in machine.held) + request.shape.num_prompt
        return held <= kind.num_blocks * kind.block_size

    def _decode(self, now: float) -> None:
        kind = self.kinds["decode"]
        ready = self._ready("decode", now)
        while self.computed and self.computed[0][0] <= now and ready:
            request, source = self.computed[0][2:]
            machine = min(ready, key=lambda each: len(each.rows))
            needed = math.ceil((request.shape.num_prompt + request.shape.num_output) / kind.block_size)
            if len(machine.rows) >= kind.max_num_seqs:
                break
            if machine.rows and machine.num_blocks(kind) + needed > MOST_BLOCKS * kind.num_blocks:
                break
            heapq.heappop(self.computed)
            source.held.remove(request)
            request.left = request.shape.num_output - 1
            machine.rows.append(request)
        for machine in self.machines["decode"]:
            if machine.rows:
                self.busy_s["decode"] += TICK_S
                self._step(machine, now)

    def _step(self, machine: Machine, now: float) -> None:
        shape = StepShape.of_rows(len(machine.rows), int(sum(row.context for row in machine.rows)))
        token_s = self.kinds["decode"].model.seconds(shape) * self._chance.gauss(1.0, self._noise)
        free_s = max(0.1 * TICK_S, TICK_S - max(0.0, min(TICK_S, machine.free_at - now + TICK_S)))
        for row in list(machine.rows):
            row.left -= free_s / token_s
            if row.left <= 0.0:
                ended = now + row.left * token_s
                row.tpot_s = max(0.0, ended - row.first_at) / max(1, row.shape.num_output - 1)
                row.left = 0.0
                machine.rows.remove(row)
                self.done.append(row)

    # ------------------------------------------------------------ workers

    def _leave(self, now: float) -> None:
        """Workers that leave end when they are empty; running answers move to others."""
        for role in ROLES:
            ready = self._ready(role, now)
            for machine in [each for each in self.machines[role] if each.leaving]:
                if machine.rows and ready:
                    for row in machine.rows:
                        min(ready, key=lambda each: len(each.rows)).rows.append(row)
                    machine.rows = []
                if not machine.rows and not machine.held and machine.free_at <= now:
                    self.machines[role].remove(machine)
            running = sum(each.ready_at < math.inf for each in self.machines[role])
            self.worker_s[role] += TICK_S * running

    def _control(self, now: float) -> None:
        seen_arrived, seen_done, seen_refused = self._looked
        seen = Seen(
            now,
            self._fleet(now),
            self._num_arrived - seen_arrived,
            self.done[seen_done:],
            self.refused[seen_refused:],
            {role: self.busy_s[role] / CONTROL_S for role in ROLES},
            {role: sum(not each.leaving for each in self.machines[role]) for role in ROLES},
            {role: self._kv_used(role, now) for role in ROLES},
        )
        self._looked = (self._num_arrived, len(self.done), len(self.refused))
        self.busy_s = dict.fromkeys(ROLES, 0.0)
        wanted = self.controller(seen)
        self.history.append(dict(wanted))
        self.ready.append({role: len(self._ready(role, now)) for role in ROLES})
        for role in ROLES:
            self._scale(role, wanted[role], now)

    def _scale(self, role: Role, wanted: int, now: float) -> None:
        staying = [each for each in self.machines[role] if not each.leaving]
        for _ in range(wanted - len(staying)):
            has_machine = sum(each.ready_at < math.inf for each in self.machines[role]) < self.most[role]
            self.machines[role].append(Machine(now + self.start_s if has_machine else math.inf))
        staying.sort(key=lambda each: (-each.ready_at, len(each.rows)))
        for machine in staying[: max(0, len(staying) - wanted)]:
            machine.leaving = True
            if machine.ready_at > now:
                self.machines[role].remove(machine)

    def _fleet(self, now: float) -> Fleet:
        silent = any(begin <= now < end for begin, end in self.silent)
        pools = {}
        for role in ROLES:
            machines = [each for each in self.machines[role] if not each.leaving]
            num_ready = sum(each.ready_at <= now for each in machines)
            decode = role == "decode"
            pools[role] = PoolState(
                kind=self.kinds[role],
                num_ready=0 if silent else num_ready,
                num_silent=num_ready if silent else 0,
                num_starting=len(machines) - num_ready,
                num_unschedulable=sum(math.isinf(each.ready_at) for each in machines),
                num_held=0 if silent else sum(len(each.rows if decode else each.held) for each in machines),
                num_waiting=0 if silent else self._num_blocked(now) if decode else len(self.waiting),
                is_full=not silent and self._num_blocked(now) > 0,
            )
        held = {role: 0 if self._ready(role, now) else len(self.waiting) for role in ROLES}
        return Fleet(pools, self.threshold, dict.fromkeys(ROLES, self.start_s), held)

    def _kv_used(self, role: Role, now: float) -> float:
        kind, ready = self.kinds[role], self._ready(role, now)
        held = sum(one.shape.num_prompt for each in ready for one in each.held) / kind.block_size
        rows = sum(math.ceil(row.context / kind.block_size) for each in ready for row in each.rows)
        return (held + rows) / max(1, len(ready) * kind.num_blocks)

    def _num_blocked(self, now: float) -> int:
        """Computed prompts that no decode worker has room for."""
        return sum(first_at <= now for first_at, *_ in self.computed)


def poisson(
    rate: Callable[[float], float], seconds: float, shape: Callable[[random.Random], SampledRequest], seed: int = 1
) -> list[Request]:
    """Arrivals of independent clients at a rate that changes, by thinning (Lewis and Shedler, 1979)."""
    chance = random.Random(seed)
    most = max(rate(float(second)) for second in range(int(seconds)))
    now, found = 0.0, []
    while most > 0.0 and (now := now + chance.expovariate(most)) < seconds:
        if chance.random() * most <= rate(now):
            found.append(Request(now, shape(chance)))
    return found
