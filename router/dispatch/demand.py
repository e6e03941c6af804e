"""The load of each pool, in the units that autoscalers take. Pure.

`held` and `backlog_s` are this router's own share: add up those of several routers. `pressure` and `workers` come from
the workers' heartbeats, which every router gets: take the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from common.cluster import DecodeLoad, backlog_s, pressure, unblocked_share
from common.wire import ROLES
from router.dispatch.request_state import RequestState
from router.fleet import Worker, WorkerState

STATES = (*(str(state) for state in WorkerState), "withheld")


@dataclass(frozen=True, slots=True)
class Demand:
    """`held`: sequences that find no worker, by role; `backlog_s`: seconds of prompts for one prefill worker;
    `pressure`: load in decode workers; `workers`: workers by role and state. `num_running` and `num_waiting`: sequences
    of all ready workers, and those that wait here; `kv_usage`: share of the ready decode workers' blocks in use."""

    held: Mapping[str, int]
    backlog_s: float
    pressure: float
    workers: Mapping[tuple[str, str], int]
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


@dataclass(slots=True)
class DemandMeter:
    """`has_prefill`: a prefill pool is configured, though it may be empty. Prompts of at most `threshold` tokens never
    need it."""

    has_prefill: bool
    threshold: int
    prefill_tokens_per_s: float = 0.0

    def measure(
        self,
        states: Iterable[RequestState],
        queue: Collection[RequestState],
        workers: Collection[Worker],
        slo_s: float,
    ) -> Demand:
        """The present load. `slo_s` is the goal for the time of a token, or 0."""
        ready = [worker for worker in workers if worker.ready]
        self._learn_rate(ready)
        decode = [worker for worker in ready if worker.role == "decode"]
        return Demand(
            {
                "decode": sum(state.held_s is None for state in queue),
                "prefill": self._num_without_prefill(states, ready),
            },
            self._backlog_s(queue, workers),
            sum(pressure(_decode_work(worker), slo_s) for worker in decode),
            _by_state(workers),
            sum(worker.beat.num_running for worker in ready if worker.beat),
            len(queue) + sum(worker.beat.num_waiting for worker in ready if worker.beat),
            _pool_usage(decode),
        )

    def _num_without_prefill(self, states: Iterable[RequestState], ready: Collection[Worker]) -> int:
        """Sequences that wait, or that a decode worker serves alone, because no prefill worker is ready."""
        if not self.has_prefill or any(worker.role == "prefill" for worker in ready):
            return 0
        return sum(
            not state.done and state.prefill is None and len(state.request.prompt_token_ids) > self.threshold
            for state in states
        )

    def _backlog_s(self, queue: Iterable[RequestState], workers: Iterable[Worker]) -> float:
        if not self.has_prefill:
            return 0.0
        """Prompts in the queue wait for a decode worker, unless there is no prefill worker to compute them either."""
        prefill = [worker for worker in workers if worker.role == "prefill"]
        booked = sum(worker.booked.num_tokens * _unblocked_share(worker) for worker in prefill)
        lengths = (len(state.request.prompt_token_ids) for state in queue)
        held = 0 if any(worker.ready for worker in prefill) else sum(n for n in lengths if n > self.threshold)
        return backlog_s(booked + held, self.prefill_tokens_per_s)

    def _learn_rate(self, ready: Iterable[Worker]) -> None:
        """The mean rate of prefill workers that have one; while none has, the last known mean stays."""
        beats = [worker.beat for worker in ready if worker.role == "prefill" and worker.beat is not None]
        rates = [beat.full_tokens_per_s for beat in beats if beat.full_tokens_per_s > 0]
        if rates:
            self.prefill_tokens_per_s = sum(rates) / len(rates)


def _kv_usage(worker: Worker) -> float:
    total = worker.hello.num_blocks if worker.hello else 0
    return worker.beat.num_owned_blocks / total if worker.beat and total else 0.0


def _pool_usage(decode: Iterable[Worker]) -> float:
    heard = [worker for worker in decode if worker.hello and worker.beat]
    total = sum(worker.hello.num_blocks for worker in heard if worker.hello)
    return sum(worker.beat.num_owned_blocks for worker in heard if worker.beat) / total if total else 0.0


def _unblocked_share(worker: Worker) -> float:
    beat = worker.beat
    return unblocked_share(_kv_usage(worker), beat.num_running, beat.num_transferring) if beat else 1.0


def _decode_work(worker: Worker) -> DecodeLoad:
    beat = worker.beat
    if beat is None:
        return DecodeLoad(0.0, 0, 0, 0, 0, worker.likely_model)
    held = beat.num_running + beat.num_transferring
    return DecodeLoad(
        _kv_usage(worker), held, beat.num_waiting, beat.num_running, beat.num_context_tokens, worker.likely_model
    )


def _by_state(workers: Iterable[Worker]) -> dict[tuple[str, str], int]:
    counts = Counter((worker.role, worker.shown_state) for worker in workers)
    return {(role, state): counts[role, state] for role in ROLES for state in STATES}
