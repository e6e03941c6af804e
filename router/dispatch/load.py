"""Where requests are and how the workers are, in numbers: for metrics and for /load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from router.dispatch.forecast import wait_s
from router.dispatch.request_state import RequestState, Stage
from router.fleet.fleet import WorkerFleet
from router.fleet.worker import Worker
from router.fleet.worker_connection import Connection


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker: what it reports and what is booked on it. `reason` says why it is not ready. `role` is its present
    role, `home` the one that it was started with.

    A new prompt waits `wait_s` there; `step_model` is what the worker says of its steps.
    """

    address: str
    role: str
    worker_id: str
    state: str
    num_requests: int
    num_queued_tokens: int
    num_available_blocks: int
    num_blocks: int
    num_booked_requests: int
    tokens_per_s: float
    step_time_s: float
    num_dropped_frames: int
    num_unsent: int
    num_cuts: int
    reason: str = ""
    wait_s: float = 0.0
    step_model: Mapping[str, float] = field(default_factory=dict)
    home: str = ""

    @classmethod
    def of(cls, worker: Worker, connection: Connection, now: float) -> WorkerLoad:
        return cls(
            address=worker.address,
            role=worker.role,
            worker_id=worker.worker_id,
            state=worker.shown_state,
            num_requests=worker.num_requests,
            num_queued_tokens=worker.num_queued_tokens,
            num_available_blocks=worker.num_available_blocks,
            num_blocks=worker.hello.num_blocks if worker.hello else 0,
            num_booked_requests=worker.booked.num_requests,
            tokens_per_s=worker.beat.tokens_per_s if worker.beat else 0.0,
            step_time_s=worker.beat.step_time_s if worker.beat else 0.0,
            num_dropped_frames=connection.drops.num_dropped,
            num_unsent=connection.counters.num_unsent,
            num_cuts=connection.counters.num_cuts,
            reason=worker.withheld or worker.reason,
            wait_s=wait_s(worker, now) if worker.ready else 0.0,
            step_model=msgspec.structs.asdict(worker.step_model),
            home=worker.home,
        )


@dataclass(frozen=True, slots=True)
class DispatchLoad:
    """A snapshot. `stages` counts requests by stage, `wait_limit_s` is how long a new one may have to wait; the rest
    counts since the start, `role_changes` by (from, to)."""

    stages: Mapping[str, int]
    workers: tuple[WorkerLoad, ...]
    num_retries: Mapping[str, int]
    num_failures: Mapping[str, int]
    num_choices: Mapping[str, int]
    num_stale_deltas: int
    num_handovers: Mapping[str, int] = field(default_factory=dict)
    wait_limit_s: float = 0.0
    role_changes: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        states: Iterable[RequestState],
        fleet: WorkerFleet,
        counters: DispatchCounters,
        wait_limit_s: float,
        now: float,
    ) -> DispatchLoad:
        stages = dict.fromkeys((str(stage) for stage in Stage if stage is not Stage.DONE), 0)
        stages |= Counter(str(state.stage) for state in states if not state.done)
        workers = fleet.registry.workers
        return cls(
            stages,
            tuple(WorkerLoad.of(workers[address], link, now) for address, link in fleet.connections.items()),
            dict(counters.num_retries),
            dict(counters.num_failures),
            dict(counters.num_choices),
            counters.num_stale_deltas,
            dict(counters.num_handovers),
            wait_limit_s,
            dict(fleet.registry.role_changes),
        )


@dataclass(slots=True)
class DispatchCounters:
    """Retries by the failed worker's role, failures by error class, choices by kind (remote, local, prefill).

    Hand-overs by outcome: done; failed (the old worker went on); ended (the answer ended, or its old worker).
    """

    num_retries: Counter[str] = field(default_factory=Counter)
    num_failures: Counter[str] = field(default_factory=Counter)
    num_choices: Counter[str] = field(default_factory=Counter)
    num_stale_deltas: int = 0
    num_handovers: Counter[str] = field(default_factory=Counter)
