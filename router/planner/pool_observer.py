"""Sees the pools as the registry knows them, and remembers what a worker was like while there is none. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from common.latency import StepModel
from common.observe import Ewma
from common.wire import Role
from router.fleet import Worker, WorkerState
from router.planner.pool import PoolState, WorkerKind
from router.policy import step_tokens

LOST_S = 60.0
"""A worker that has been silent for longer is gone."""
STARTING = (WorkerState.UNKNOWN, WorkerState.CONNECTED)
SHARE_SMOOTHING = 0.2
"""The share of one more look in the average number of routers."""
MOST_ROUTERS = 64.0
"""A router that has hardly any requests of its own would count far too many."""


class PoolObserver:
    """`roles`: the pools that there are, though they may be empty."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._kinds: dict[Role, WorkerKind] = {role: WorkerKind() for role in roles}
        self._others = Ewma(SHARE_SMOOTHING, start=1.0)

    def observe(
        self, workers: Collection[Worker], unschedulable: Mapping[Role, int], now: float
    ) -> dict[Role, PoolState]:
        """The state of each pool. Of a role `unschedulable` workers find no machine; they are not among `workers`."""
        by_role = {role: [worker for worker in workers if worker.role == role] for role in self._kinds}
        for role, pool in by_role.items():
            self._kinds[role] = _kind([worker for worker in pool if worker.ready], self._kinds[role])
        return {
            role: _state(pool, self._kind_of(role), unschedulable.get(role, 0), now) for role, pool in by_role.items()
        }

    def num_routers(self, workers: Collection[Worker]) -> float:
        """How many times this router's own load all routers have together, by the requests that decode workers report.

        A prefill worker still reports a prompt whose first token has come: it holds the KV until that is taken.
        """
        decode = [worker for worker in workers if worker.ready and worker.role == "decode"]
        own = sum(worker.booked.num_requests for worker in decode)
        total = sum(max(worker.num_requests, worker.booked.num_requests) for worker in decode)
        if own:
            self._others.observe(min(MOST_ROUTERS, total / own))
        return self._others.value

    def homes(self, workers: Collection[Worker]) -> dict[Role, int]:
        """Workers by the role that they were started with, if each of them may change it; else nothing."""
        serving = [worker for worker in workers if worker.ready or _is_changing(worker)]
        if not serving or not all(worker.identity.changes_role for worker in serving):
            return {}
        return {role: sum(worker.home == role for worker in serving) for role in self._kinds}

    def _kind_of(self, role: Role) -> WorkerKind:
        """A pool that never had a worker is taken for one like the other pool's, if that has computed such steps."""
        kind = self._kinds[role]
        if kind.is_known and (role == "decode" or kind.model.knows_prompts):
            return kind
        other: Role = "decode" if role == "prefill" else "prefill"
        found = self._kinds.get(other, kind)
        return found if found.is_known and found.model.knows_prompts and role == "prefill" else kind


def _kind(ready: Sequence[Worker], before: WorkerKind) -> WorkerKind:
    """The mean worker of those that have a model of their steps; the one of before while none has."""
    known = [worker for worker in ready if worker.step_model.is_known]
    if not known:
        return before
    models = [worker.step_model for worker in known]
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
    starting = [worker for worker in pool if not worker.has_served and not worker.withheld and worker.state in STARTING]
    num_waiting = sum(worker.beat.num_waiting for worker in ready if worker.beat)
    return PoolState(
        kind=kind,
        num_ready=len(ready),
        num_starting=len(starting) + num_unschedulable,
        num_unschedulable=num_unschedulable,
        num_silent=len(silent),
        num_draining=len(draining),
        num_held=sum(max(0, worker.num_requests - (worker.beat.num_waiting if worker.beat else 0)) for worker in ready),
        num_waiting=num_waiting,
        is_full=bool(ready) and all(worker.beat and worker.beat.num_waiting for worker in ready),
    )


def _is_changing(worker: Worker) -> bool:
    """It drains, or has just begun in its other role, and nothing says that it leaves."""
    changing = worker.state in (WorkerState.DRAINING, WorkerState.CONNECTED) and worker.hello is not None
    return changing and not worker.withheld and worker.identity.changes_role


def _is_silent(worker: Worker, now: float) -> bool:
    """It served, and is not heard since a moment ago."""
    gone = worker.state in (WorkerState.DEAD, WorkerState.UNKNOWN) and not worker.withheld
    return gone and worker.has_served and worker.last_seen is not None and now - worker.last_seen <= LOST_S
