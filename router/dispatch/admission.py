"""Whether a new request would wait too long, by what the workers have to do and how fast they are. Pure.

Only what is known counts: a worker whose rate nobody has seen yet is taken for an idle one. The request's own prefill
is left out, because nobody knows before its place is chosen how much of it is cached. Where the prediction is too
bright, those who wait already tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from diptych.common.errors import Overloaded
from diptych.common.settings import RouterConfig
from diptych.router.dispatch.registry import WorkerRegistry
from diptych.router.dispatch.worker import Worker

SLO_MARGIN = 1.5
"""Waiting this much longer than the time to the first token may take is a miss beyond doubt."""
MAX_RETRY_AFTER_S = 60.0
SCARCE = 0.05
"""A decode worker with less than this share of its blocks to give is full, whatever its number of sequences."""
NUM_LATE = 4
"""So many requests must have waited too long already: one alone may just be a long prompt."""


class Admission:
    """Takes new requests or refuses them. Those that have begun are never asked."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig) -> None:
        self._registry, self._config = registry, config
        self._observed: Mapping[str, float] = {}

    def observe(self, waits: Iterable[tuple[str, float]]) -> None:
        """(address, seconds) for each request that waits for its first token from a worker; once a tick."""
        self._observed = observed_waits_s(waits)

    def check(self, num_tokens: int) -> None:
        """Raises Overloaded for a prompt that would only be served when its client has lost patience."""
        registry, config = self._registry, self._config
        prefill = registry.ready("prefill") if num_tokens > config.local_prefill_threshold else []
        wait_s = predicted_wait_s(prefill, registry.ready("decode"), self._observed)
        longest_s = min(config.max_wait_s, config.queue_timeout_s)
        error = refusal(wait_s, max_wait_s=longest_s, slo_ttft_s=config.slo_ttft_ms / 1000)
        if error is not None:
            raise error


def observed_waits_s(waits: Iterable[tuple[str, float]]) -> dict[str, float]:
    """For each address what all but a few of the longest waits are below; none while only a few wait."""
    by_address: dict[str, list[float]] = {}
    for address, wait_s in waits:
        by_address.setdefault(address, []).append(wait_s)
    return {address: sorted(waits_s)[-NUM_LATE] for address, waits_s in by_address.items() if len(waits_s) >= NUM_LATE}


def prefill_wait_s(worker: Worker) -> float:
    """Seconds until the worker has computed the prompts that it has."""
    rate = worker.beat.full_tokens_per_s if worker.beat else 0.0
    return worker.num_queued_tokens / rate if rate > 0 else 0.0


def decode_wait_s(worker: Worker) -> float:
    """Seconds until the worker has a place in its batch for one more: Little's law over those who wait before it."""
    beat, hello = worker.beat, worker.hello
    if beat is None or hello is None:
        return 0.0
    num_places = max(1, hello.max_num_seqs)
    if beat.num_waiting and worker.num_available_blocks < SCARCE * hello.num_blocks:
        num_places = max(1, beat.num_running + beat.num_transferring)
    num_before = worker.num_requests + 1 - num_places
    return max(0, num_before) * worker.service_s / num_places


def predicted_wait_s(
    prefill: Sequence[Worker], decode: Sequence[Worker], observed: Mapping[str, float] = MappingProxyType({})
) -> float:
    """Seconds that a new request would wait at the best of the ready workers, all of its own work left out.

    `observed` says by address how long others wait there already.
    """
    workers = prefill or decode
    first = min((max(prefill_wait_s(worker), observed.get(worker.address, 0.0)) for worker in workers), default=0.0)
    place = min((decode_wait_s(worker) for worker in decode), default=0.0)
    return max(first, place)


def refusal(wait_s: float, *, max_wait_s: float, slo_ttft_s: float = 0.0) -> Overloaded | None:
    """The error for a request that would wait longer than it may; None for one to be taken. `slo_ttft_s` 0: no SLO."""
    limit_s = min(max_wait_s, SLO_MARGIN * slo_ttft_s) if slo_ttft_s > 0 else max_wait_s
    if wait_s <= limit_s:
        return None
    why = f"a new request would wait about {wait_s:.1f} s, the most it may is {limit_s:g} s"
    return Overloaded(why, retry_after_s=min(MAX_RETRY_AFTER_S, max(1.0, wait_s - limit_s)))
