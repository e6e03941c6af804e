"""Snapshots of requests and workers for metrics, `/load` and autoscalers.

`held`, `backlog_s` and `prefill_pressure` are this router's share: sum them over routers. `pressure` and `workers` come
from heartbeats, which every router receives: take the maximum over routers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from common.cluster import DecodeLoad, backlog_s, prefill_pressure, pressure, unblocked_share
from common.config import DEFAULT, RequestClass
from common.wire import ROLES, Role
from router.dispatch.request_state import RequestState, Stage
from router.fleet import FleetEvent, Worker, WorkerConnection, WorkerFleet, WorkerState
from router.policy import step_tokens, wait_s

STATES = (*(str(state) for state in WorkerState), "withheld")


@dataclass(frozen=True, slots=True)
class Demand:
    """Load of the pools, as autoscalers read it.

    `held`: sequences without a worker, by role. `backlog_s`: prompts in seconds of one prefill worker.
    `prefill_pressure` and `pressure`: load in prefill and in decode workers. `workers`: number of workers by role and
    state. `num_running`, `num_waiting`: sequences on ready workers, and queued ones including this router's.
    `kv_usage`: fraction of the ready decode workers' blocks in use.
    """

    held: Mapping[str, int]
    backlog_s: float
    prefill_pressure: float
    pressure: float
    workers: Mapping[tuple[str, str], int]
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


@dataclass(slots=True)
class DemandMeter:
    """Measures the load of the pools.

    `has_prefill`: a prefill pool is configured, even if it is empty. Prompts of at most `threshold` tokens never need
    it.
    """

    has_prefill: bool
    threshold: int
    prefill_tokens_per_s: float = 0.0

    def measure(
        self,
        states: Iterable[RequestState],
        queue: Collection[RequestState],
        workers: Collection[Worker],
        slo_s: float,
        prefilled_per_s: float,
    ) -> Demand:
        """Return the current load.

        `slo_s` is the goal for the time per output token, 0 for none. `prefilled_per_s` is the recent rate of prompt
        tokens that prefill workers computed.
        """
        ready = [worker for worker in workers if worker.ready]
        self._learn_rate(ready)
        decode = [worker for worker in ready if worker.role == "decode"]
        waiting_s = self._backlog_s(queue, workers)
        return Demand(
            {
                "decode": sum(state.held_s is None for state in queue),
                "prefill": self._num_without_prefill(states, ready),
            },
            waiting_s,
            prefill_pressure(backlog_s(prefilled_per_s, self.prefill_tokens_per_s), waiting_s),
            sum(pressure(_decode_work(worker), slo_s) for worker in decode),
            _by_state(workers),
            sum(worker.load.beat.num_running for worker in ready if worker.load.beat),
            len(queue) + sum(worker.load.beat.num_waiting for worker in ready if worker.load.beat),
            _pool_usage(decode),
        )

    def _num_without_prefill(self, states: Iterable[RequestState], ready: Collection[Worker]) -> int:
        """Return the number of sequences that wait or are prefilled locally because no prefill worker is ready."""
        if not self.has_prefill or any(worker.role == "prefill" for worker in ready):
            return 0
        return sum(
            not state.done and state.attempts.prefill is None and len(state.request.prompt_token_ids) > self.threshold
            for state in states
        )

    def _backlog_s(self, queue: Iterable[RequestState], workers: Iterable[Worker]) -> float:
        if not self.has_prefill:
            return 0.0
        # Queued prompts wait for a decode worker, except when there is no prefill worker either.
        prefill = [worker for worker in workers if worker.role == "prefill"]
        booked = sum(worker.bookings.total.num_tokens * _unblocked_share(worker) for worker in prefill)
        lengths = (len(state.request.prompt_token_ids) for state in queue)
        held = 0 if any(worker.ready for worker in prefill) else sum(n for n in lengths if n > self.threshold)
        return backlog_s(booked + held, self.prefill_tokens_per_s)

    def _learn_rate(self, ready: Iterable[Worker]) -> None:
        """Update the mean rate over prefill workers that report one. Keeps the last mean if none does."""
        beats = [worker.load.beat for worker in ready if worker.role == "prefill" and worker.load.beat is not None]
        rates = [beat.full_tokens_per_s for beat in beats if beat.full_tokens_per_s > 0]
        if rates:
            self.prefill_tokens_per_s = sum(rates) / len(rates)


def _kv_usage(worker: Worker) -> float:
    total = worker.hello.num_blocks if worker.hello else 0
    return worker.load.beat.num_owned_blocks / total if worker.load.beat and total else 0.0


def _pool_usage(decode: Iterable[Worker]) -> float:
    heard = [worker for worker in decode if worker.hello and worker.load.beat]
    total = sum(worker.hello.num_blocks for worker in heard if worker.hello)
    return sum(worker.load.beat.num_owned_blocks for worker in heard if worker.load.beat) / total if total else 0.0


def _unblocked_share(worker: Worker) -> float:
    beat = worker.load.beat
    return unblocked_share(_kv_usage(worker), beat.num_running, beat.num_transferring) if beat else 1.0


def _decode_work(worker: Worker) -> DecodeLoad:
    beat = worker.load.beat
    if beat is None:
        return DecodeLoad(0.0, 0, 0, 0, 0, worker.load.likely_model)
    held = beat.num_running + beat.num_transferring
    return DecodeLoad(
        _kv_usage(worker), held, beat.num_waiting, beat.num_running, beat.num_context_tokens, worker.load.likely_model
    )


def _by_state(workers: Iterable[Worker]) -> dict[tuple[str, str], int]:
    counts = Counter((worker.role, worker.shown_state) for worker in workers)
    return {(role, state): counts[role, state] for role in ROLES for state in STATES}


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """State of one worker: its reports, and what is booked on it.

    `reason` explains why it is not ready, or why no worker of the other pool can exchange KV with it. `role` is its
    current role, `home` the role that it was started with. `wait_s` is the predicted wait of a new prompt, `lag_s`
    the average excess of the first token's time over the prediction. `step_model` and `link_model` are fitted by
    the worker. `num_known_blocks` is the size of its prefix cache as known to this router. `batch_cap` is the
    maximum batch size and `step_tokens` the maximum prompt tokens per step, from flags or set by the worker itself;
    0 if unknown. `block_size`, `max_num_seqs`, `max_step_tokens`, `window`, `model` and `memory_bytes` come from its
    hello.
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
    lag_s: float = 0.0
    step_model: Mapping[str, float] = field(default_factory=dict)
    link_model: Mapping[str, float] = field(default_factory=dict)
    num_known_blocks: int = 0
    home: str = ""
    batch_cap: int = 0
    step_tokens: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    max_step_tokens: int = 0
    window: int = 0
    model: str = ""
    memory_bytes: int = 0

    @classmethod
    def of(
        cls, worker: Worker, connection: WorkerConnection, now: float, num_known_blocks: int = 0, unpaired: str = ""
    ) -> WorkerLoad:
        return cls(
            address=worker.address,
            role=worker.role,
            worker_id=worker.worker_id,
            state=worker.shown_state,
            num_requests=worker.load.num_requests,
            num_queued_tokens=worker.load.num_queued_tokens,
            num_available_blocks=worker.load.num_available_blocks,
            num_blocks=worker.hello.num_blocks if worker.hello else 0,
            num_booked_requests=worker.bookings.total.num_requests,
            tokens_per_s=worker.load.beat.tokens_per_s if worker.load.beat else 0.0,
            step_time_s=worker.load.beat.step_time_s if worker.load.beat else 0.0,
            num_dropped_frames=connection.drops.num_dropped,
            num_unsent=connection.counters.num_unsent,
            num_cuts=connection.counters.num_cuts,
            reason=worker.withheld or worker.reason or unpaired,
            wait_s=wait_s(worker, now) if worker.ready else 0.0,
            lag_s=worker.estimates.lag_s,
            step_model=msgspec.structs.asdict(worker.load.step_model),
            link_model=msgspec.structs.asdict(worker.load.likely_link),
            num_known_blocks=num_known_blocks,
            home=worker.home,
            batch_cap=_batch_cap(worker),
            step_tokens=step_tokens(worker) if worker.hello else 0,
            block_size=worker.hello.block_size if worker.hello else 0,
            max_num_seqs=worker.hello.max_num_seqs if worker.hello else 0,
            max_step_tokens=worker.hello.max_step_tokens if worker.hello else 0,
            window=worker.hello.window if worker.hello else 0,
            model=worker.hello.model if worker.hello else "",
            memory_bytes=worker.hello.memory_bytes if worker.hello else 0,
        )


def _batch_cap(worker: Worker) -> int:
    if worker.hello is None:
        return 0
    return (worker.load.beat.batch_cap if worker.load.beat else 0) or worker.hello.max_num_seqs


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """State of one class of requests: goals in milliseconds, share (0: no separate lane) and current load.

    `num_waiting` requests are on no worker; `num_held` of them wait for earlier prompts. The oldest has waited
    `oldest_wait_s`. A new request may have to wait up to `wait_limit_s`. `num_refused` counts since the start.
    `attainment` is the fraction of the last minute's requests that met a goal, by goal.
    """

    name: str
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    priority: int = 0
    num_in_flight: int = 0
    num_waiting: int = 0
    num_held: int = 0
    oldest_wait_s: float = 0.0
    wait_limit_s: float = 0.0
    num_refused: int = 0
    attainment: Mapping[str, float] = field(default_factory=dict)
    share: float = 0.0

    @classmethod
    def of(
        cls, one: RequestClass, states: Iterable[RequestState], wait_limit_s: float, num_refused: int, now: float
    ) -> ClassLoad:
        """Create from `states`, the requests of the class."""
        active = [state for state in states if not state.done]
        waiting = [state for state in active if state.stage is Stage.QUEUE]
        return cls(
            one.name,
            one.ttft_s * 1e3,
            one.tpot_s * 1e3,
            one.priority,
            len(active),
            len(waiting),
            sum(state.held_s is not None for state in waiting),
            max((now - state.times.queued_at for state in waiting), default=0.0),
            wait_limit_s,
            num_refused,
            share=one.share,
        )


@dataclass(frozen=True, slots=True)
class DispatchLoad:
    """Snapshot of the dispatcher.

    `stages` counts requests by stage. `wait_limit_s` is the maximum wait of a new request of class `default`. `events`
    are recent worker events. The rest counts since the start; `role_changes` by (from, to).
    """

    stages: Mapping[str, int]
    workers: tuple[WorkerLoad, ...]
    num_retries: Mapping[str, int]
    num_failures: Mapping[str, int]
    num_choices: Mapping[str, int]
    num_stale_deltas: int
    num_handovers: Mapping[str, int] = field(default_factory=dict)
    num_balanced: Mapping[str, int] = field(default_factory=dict)
    wait_limit_s: float = 0.0
    classes: tuple[ClassLoad, ...] = ()
    num_taken_back: int = 0
    num_policy_errors: int = 0
    role_changes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    events: tuple[FleetEvent, ...] = ()

    @classmethod
    def of(
        cls,
        states: Collection[RequestState],
        fleet: WorkerFleet,
        counters: DispatchCounters,
        classes: Mapping[str, RequestClass],
        wait_limits_s: Mapping[str, float],
        now: float,
    ) -> DispatchLoad:
        stages = dict.fromkeys((str(stage) for stage in Stage if stage is not Stage.DONE), 0)
        stages |= Counter(str(state.stage) for state in states if not state.done)
        workers = fleet.registry.workers
        by_class: dict[str, list[RequestState]] = {name: [] for name in classes}
        for state in states:
            by_class.get(state.request.request_class, by_class[DEFAULT]).append(state)
        return cls(
            stages,
            tuple(
                WorkerLoad.of(workers[address], link, now, fleet.index.size(address), fleet.pairing.detail(address))
                for address, link in fleet.connections.items()
            ),
            dict(counters.num_retries),
            dict(counters.num_failures),
            dict(counters.num_choices),
            counters.num_stale_deltas,
            dict(counters.num_handovers),
            dict(counters.num_balanced),
            wait_limits_s[DEFAULT],
            tuple(
                ClassLoad.of(one, by_class[name], wait_limits_s[name], counters.num_refused[name], now)
                for name, one in classes.items()
            ),
            counters.num_taken_back,
            counters.num_policy_errors,
            dict(fleet.registry.role_changes),
            fleet.recent_events(now),
        )


@dataclass(slots=True)
class DispatchCounters:
    """Counters since the start.

    - `num_retries` by the failed worker's role, `num_failures` by error class, `num_choices` by kind (remote, local,
      prefill).
    - `num_refused`: rejected because of a goal, by class. `num_refused_for`: the same by the role that lacks workers.
    - `num_taken_back`: prompts revoked from slow workers.
    - `num_handovers` by outcome: done; failed (the source continued); ended (the answer or its source ended).
      `num_balanced`: those started between ready workers, by the scarce resource: blocks or time per token.
    - `num_policy_errors`: decisions in which the routing policy raised.
    """

    num_retries: Counter[str] = field(default_factory=Counter)
    num_failures: Counter[str] = field(default_factory=Counter)
    num_choices: Counter[str] = field(default_factory=Counter)
    num_stale_deltas: int = 0
    num_handovers: Counter[str] = field(default_factory=Counter)
    num_balanced: Counter[str] = field(default_factory=Counter)
    num_refused: Counter[str] = field(default_factory=Counter)
    num_refused_for: Counter[Role] = field(default_factory=Counter)
    num_taken_back: int = 0
    num_policy_errors: int = 0
