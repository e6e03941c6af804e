"""The planner's view of a pool: workers from the registry, start times and bounds. Pure.

The observer remembers the properties of workers while there are none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from common.latency import StepModel
from common.observe import Ewma
from common.wire import ROLES, Role
from router.fleet import Worker, WorkerState
from router.policy import step_tokens


@dataclass(frozen=True, slots=True)
class Goals:
    """Goals in seconds for the first token and each later one, to be met by the fraction `quantile` of requests.

    0 means no goal.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    quantile: float = 0.95


@dataclass(frozen=True, slots=True)
class Bounds:
    """Minimum and maximum workers of a pool, and the price of one in units of the budget."""

    least: int = 0
    most: int = 64
    price: float = 1.0

    def clamp(self, num: int) -> int:
        return min(self.most, max(self.least, num))


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Properties of a pool's workers: step model and limits.

    `window`: maximum tokens of a sequence with KV, 0 for all.
    """

    model: StepModel = StepModel()
    num_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 1
    step_tokens: int = 512
    window: int = 0

    def num_kept(self, num_tokens: float) -> float:
        """Return the number of a sequence's tokens whose KV is kept."""
        return min(num_tokens, self.window) if self.window else num_tokens

    @property
    def is_known(self) -> bool:
        """Whether predictions are possible."""
        return self.model.is_known and self.num_blocks > 0


@dataclass(frozen=True, slots=True)
class PoolState:
    """Workers of a pool by state, and requests there.

    `num_starting` workers are not ready yet; `num_unschedulable` of them have no node and may never get one.
    `num_silent` have served and are silent now. `num_draining` are leaving. `num_held` requests own blocks,
    `num_waiting` do not yet. `is_full`: requests wait on every ready worker.
    """

    kind: WorkerKind = WorkerKind()
    num_ready: int = 0
    num_starting: int = 0
    num_unschedulable: int = 0
    num_silent: int = 0
    num_draining: int = 0
    num_held: int = 0
    num_waiting: int = 0
    is_full: bool = False

    @property
    def num_present(self) -> int:
        """Workers that serve or will serve, without draining ones."""
        return self.num_ready + self.num_starting + self.num_silent

    @property
    def num_usable(self) -> int:
        """Workers that serve or can be scheduled, without silent ones."""
        return self.num_ready + max(0, self.num_starting - self.num_unschedulable)


MOST_START_S = 300.0
"""Assumed upper limit of a start time before the first measurement, in seconds: images and weights take minutes."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """State of both pools. Decode workers compute prompts of at most `threshold` uncached tokens.

    `start_s` is the time from a request for a worker to its readiness, by role, where it is known. `num_held` requests
    have no worker of a role. `homes` counts workers by the role with which they were started, if all of them may change
    roles; it is empty if roles are fixed.

    `replicas` are the deployed sizes of the pools, empty if they are not known. `missing` says why this view of workers
    and load is incomplete, "" if it is complete.
    """

    pools: Mapping[Role, PoolState]
    threshold: int = 64
    start_s: Mapping[Role, float] = field(default_factory=dict)
    num_held: Mapping[Role, int] = field(default_factory=dict)
    homes: Mapping[Role, int] = field(default_factory=dict)
    replicas: Mapping[Role, int] = field(default_factory=dict)
    missing: str = ""

    def most_start_s(self, role: Role) -> float:
        """Return an upper limit of the time that a worker's start takes, in seconds."""
        return self.start_s.get(role, MOST_START_S)

    def size(self, role: Role) -> int:
        """Return the current size of a pool: the deployed one if it is known, else the workers that exist."""
        if role in self.replicas:
            return self.replicas[role]
        return self.homes[role] + self.pools[role].num_starting if self.homes else self.pools[role].num_present

    @property
    def has_prefill(self) -> bool:
        return "prefill" in self.pools


NUM_REMEMBERED = 8
"""Number of stored start times per role. The longest is the prediction for the next one."""
LONGEST_S = 3600.0
"""Time after which a worker that is not ready no longer counts as starting, in seconds."""


class StartTimes:
    """Measures start times: an increase of wanted workers begins starts, an increase of ready ones ends the oldest."""

    def __init__(self) -> None:
        self._begun: dict[Role, deque[float]] = {role: deque() for role in ROLES}
        self._took: dict[Role, deque[float]] = {role: deque(maxlen=NUM_REMEMBERED) for role in ROLES}
        self._ready: dict[Role, int] = {}
        self._wanted: dict[Role, int] = {}

    def observe(self, role: Role, wanted: int, ready: int, now: float) -> None:
        """Record the current numbers of wanted and ready workers."""
        begun = self._begun[role]
        for _ in range(max(0, ready - self._ready.get(role, ready))):
            if begun:
                self._took[role].append(now - begun.popleft())
        begun.extend([now] * max(0, wanted - self._wanted.get(role, max(wanted, ready))))
        while len(begun) > max(0, wanted - ready):
            begun.pop()  # no longer wanted
        while begun and begun[0] < now - LONGEST_S:
            begun.popleft()
        self._ready[role], self._wanted[role] = ready, wanted

    def seconds(self) -> dict[Role, float]:
        """Return the longest recent start time of each role that has one."""
        return {role: max(took) for role, took in self._took.items() if took}


class StartupCheck:
    """Decides whether a router knows the existing workers yet after its start. Once it does, it does for good."""

    def __init__(self) -> None:
        self.is_complete = False
        self._listed_at: float | None = None

    def missing(self, is_listed: bool, fleet: Fleet, now: float) -> str:
        """Return what is not known yet, "" if everything is.

        `is_listed`: discovery has listed the workers. Then the check waits until all of them are ready, except for
        unschedulable ones, but no longer than the start of a worker takes. If all deployed workers are ready, it does
        not wait for discovery: DNS has no answer for the name of a pool that sleeps.
        """
        if self.is_complete:
            return ""
        num_absent = sum(
            fleet.size(role) - pool.num_unschedulable - pool.num_ready for role, pool in fleet.pools.items()
        )
        if not is_listed and (num_absent > 0 or not fleet.replicas):
            return "discovery has not listed the workers yet"
        self._listed_at = now if self._listed_at is None else self._listed_at
        if num_absent > 0 and now - self._listed_at < max(fleet.most_start_s(role) for role in fleet.pools):
            return f"{num_absent} workers are not ready yet"
        self.is_complete = True
        return ""


LOST_S = 60.0
"""Time after which a silent worker counts as gone, in seconds."""
STARTING = (WorkerState.UNKNOWN, WorkerState.CONNECTED)
SHARE_SMOOTHING = 0.2
"""Smoothing factor of the average number of routers."""
MOST_ROUTERS = 64.0
"""Maximum estimated number of routers. With a smaller share, the estimate is unreliable."""
LEAST_SHARED = 0.1
"""Minimum average number of requests from which the number of routers is estimated."""


class PoolObserver:
    """Derives the state of pools from workers. `roles`: existing pools, which may be empty."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._kinds: dict[Role, WorkerKind] = {role: WorkerKind() for role in roles}
        self._own, self._total = Ewma(SHARE_SMOOTHING), Ewma(SHARE_SMOOTHING)

    def observe(
        self, workers: Collection[Worker], unschedulable: Mapping[Role, int], now: float
    ) -> dict[Role, PoolState]:
        """Return the state of each pool. `unschedulable` workers are not among `workers`."""
        by_role = {role: [worker for worker in workers if worker.role == role] for role in self._kinds}
        for role, pool in by_role.items():
            self._kinds[role] = _kind([worker for worker in pool if worker.ready], self._kinds[role])
        return {
            role: _state(pool, self._kind_of(role), unschedulable.get(role, 0), now) for role, pool in by_role.items()
        }

    def num_routers(self, workers: Collection[Worker]) -> float:
        """Return the load of all routers as a multiple of this router's, from the requests that decode workers report.

        Infinity if this router has hardly any of them. Prefill workers are used only where they are the only ones: they
        also report completed prompts until their KV is transferred.
        """
        ready = [worker for worker in workers if worker.ready]
        serving = [worker for worker in ready if worker.role == "decode"] or ready
        own = sum(worker.bookings.total.num_requests for worker in serving)
        total = sum(max(worker.load.num_requests, worker.bookings.total.num_requests) for worker in serving)
        if total or self._total.value:
            self._own.observe(own)
            self._total.observe(total)
        if self._total.value < LEAST_SHARED:
            return 1.0
        times = self._total.value / self._own.value if self._own.value else math.inf
        return times if times <= MOST_ROUTERS else math.inf

    def homes(self, workers: Collection[Worker]) -> dict[Role, int]:
        """Return the number of workers by home role if all may change roles, else an empty mapping."""
        serving = [worker for worker in workers if worker.ready or _is_changing(worker)]
        if not serving or not all(worker.identity.changes_role for worker in serving):
            return {}
        return {role: sum(worker.home == role for worker in serving) for role in self._kinds}

    def _kind_of(self, role: Role) -> WorkerKind:
        """Return the properties of a pool's workers. A pool without any uses those of the other pool, if suitable."""
        kind = self._kinds[role]
        if kind.is_known and (role == "decode" or kind.model.knows_prompts):
            return kind
        other: Role = "decode" if role == "prefill" else "prefill"
        found = self._kinds.get(other, kind)
        return found if found.is_known and found.model.knows_prompts and role == "prefill" else kind


def _kind(ready: Sequence[Worker], before: WorkerKind) -> WorkerKind:
    """Return the mean properties of workers with a step model, or the previous ones if there are none."""
    known = [worker for worker in ready if worker.load.step_model.is_known]
    if not known:
        return before
    models = [worker.load.step_model for worker in known]
    return WorkerKind(
        model=StepModel(
            fixed_s=fmean(model.fixed_s for model in models),
            floor_s=fmean(model.floor_s for model in models),
            token_s=fmean(model.token_s for model in models),
            pair_s=fmean(model.pair_s for model in models),
            row_s=fmean(model.row_s for model in models),
            context_s=fmean(model.context_s for model in models),
            error=fmean(model.error for model in models),
            num_steps=min(model.num_steps for model in models),
        ),
        num_blocks=round(fmean(worker.identity.num_blocks for worker in known)),
        block_size=known[0].identity.block_size,
        max_num_seqs=max(1, round(fmean(worker.identity.max_num_seqs for worker in known))),
        step_tokens=step_tokens(known[0]),
        window=known[0].identity.window,
    )


def _state(pool: Sequence[Worker], kind: WorkerKind, num_unschedulable: int, now: float) -> PoolState:
    ready = [worker for worker in pool if worker.ready]
    silent = [worker for worker in pool if _is_silent(worker, now)]
    draining = [worker for worker in pool if worker.state is WorkerState.DRAINING or worker.withheld]
    starting = [
        worker for worker in pool if not worker.life.has_served and not worker.withheld and worker.state in STARTING
    ]
    num_waiting = sum(worker.load.beat.num_waiting for worker in ready if worker.load.beat)
    return PoolState(
        kind=kind,
        num_ready=len(ready),
        num_starting=len(starting) + num_unschedulable,
        num_unschedulable=num_unschedulable,
        num_silent=len(silent),
        num_draining=len(draining),
        num_held=sum(
            max(0, worker.load.num_requests - (worker.load.beat.num_waiting if worker.load.beat else 0))
            for worker in ready
        ),
        num_waiting=num_waiting,
        is_full=bool(ready) and all(worker.load.beat and worker.load.beat.num_waiting for worker in ready),
    )


def _is_changing(worker: Worker) -> bool:
    """Return whether the worker is in the middle of a role change: draining or just connected, but not leaving."""
    changing = worker.state in (WorkerState.DRAINING, WorkerState.CONNECTED) and worker.hello is not None
    return changing and not worker.withheld and worker.identity.changes_role


def _is_silent(worker: Worker, now: float) -> bool:
    """Return whether the worker has served and became silent recently."""
    gone = worker.state in (WorkerState.DEAD, WorkerState.UNKNOWN) and not worker.withheld
    return (
        gone and worker.life.has_served and worker.life.last_seen is not None and now - worker.life.last_seen <= LOST_S
    )
