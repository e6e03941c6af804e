"""Whether a new request would wait too long, by what the workers have to do and how fast they are. Pure.

Only what is known counts: a worker whose rate nobody has seen yet is taken for an idle one. The request's own prefill
is left out, because nobody knows before its place is chosen how much of it is cached. Where the prediction is too
bright, those who wait already tell, and first tokens that came later than predicted lengthen the next predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from types import MappingProxyType

from diptych.common.errors import Overloaded
from diptych.common.settings import RouterConfig
from diptych.router.dispatch.flight import Assignment, Flight, Stage
from diptych.router.dispatch.load import DispatchCounters
from diptych.router.dispatch.registry import WorkerRegistry
from diptych.router.dispatch.worker import Worker

MAX_RETRY_AFTER_S = 60.0
SCARCE = 0.05
"""A decode worker with less than this share of its blocks to give is full, whatever its number of sequences."""
NUM_LATE = 4
"""So many requests must have waited too long already: one alone may just be a long prompt."""
MIN_EXPECTED_S = 0.05
"""A shorter prediction says little when it proves wrong: messages and wake-ups take a part of that themselves."""
SMOOTHING = 0.1
MAX_SLOWNESS = 8.0
NOTHING: Mapping[str, float] = MappingProxyType({})


class Admission:
    """Takes new requests or refuses and counts them. Those that have begun are never asked."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig, counters: DispatchCounters) -> None:
        self._registry, self._config, self._counters = registry, config, counters
        self._observed: Mapping[str, float] = NOTHING
        self._lasting: Mapping[str, float] = NOTHING
        self._slowness: dict[str, float] = {}

    def observe(self, flights: Iterable[Flight], now: float) -> None:
        """Look at what runs: how long some wait for their first token, and others are being decoded; once a tick."""
        waiting, decoding = [], []
        for flight in flights:
            stage, worker = flight.stage, flight.waits_for
            if worker is not None and stage is Stage.PREFILL:
                waiting.append((worker.address, now - flight.progress_at))
            elif worker is not None and stage is Stage.DECODE:
                decoding.append((worker.address, now - worker.delivered_at))
        self._observed, self._lasting = observed_waits_s(waiting), lasting_s(decoding)

    def check(self, num_tokens: int) -> None:
        """Raises Overloaded for a prompt that would only be served when its client has lost patience."""
        error = self._refusal(short=num_tokens <= self._config.local_prefill_threshold)
        if error is not None:
            raise self._counted(error)

    def check_unread(self, is_longer: Callable[[int], bool]) -> None:
        """Raises Overloaded for a request that `check` would refuse whatever its prompt turns out to be.

        `is_longer` tells whether the prompt has more than so many tokens for sure; it is asked only where it matters:
        a short prompt, which decode workers compute themselves, may find room where a long one finds none.
        """
        error = self._refusal(short=False)
        if error is None:
            return
        if self._refusal(short=True) is not None or is_longer(self._config.local_prefill_threshold):
            raise self._counted(error)

    def expect(self, flight: Flight) -> None:
        """A request was placed: note when its first token should come, the prompts before it and its own computed."""
        assignment = flight.waits_for
        flight.expected_s = prefill_wait_s(self._registry.workers[assignment.address]) if assignment else 0.0

    def learn(self, flight: Flight, assignment: Assignment, now: float) -> None:
        """The first tokens of `assignment` are here: compare with what was expected when it was placed."""
        expected_s, flight.expected_s = flight.expected_s, 0.0
        if expected_s < MIN_EXPECTED_S or assignment is not flight.waits_for or flight.stage is not Stage.PREFILL:
            return
        known = self._slowness.get(assignment.address, 1.0)
        ratio = min(MAX_SLOWNESS, max(1.0, (now - flight.progress_at) / expected_s))
        self._slowness[assignment.address] = known + SMOOTHING * (ratio - known)

    def forget(self, address: str) -> None:
        """Another worker is there now, or none."""
        self._slowness.pop(address, None)

    def _counted(self, error: Overloaded) -> Overloaded:
        self._counters.num_failures[type(error).__name__] += 1
        return error

    def _refusal(self, *, short: bool) -> Overloaded | None:
        """The error for a new prompt; a short one is computed by decode workers."""
        registry, config = self._registry, self._config
        prefill = [] if short else registry.ready("prefill")
        wait_s = predicted_wait_s(prefill, registry.ready("decode"), self._observed, self._slowness, self._lasting)
        longest_s = min(config.max_wait_s, config.queue_timeout_s)
        return refusal(wait_s, max_wait_s=longest_s, slo_ttft_s=config.slo_ttft_ms / 1000)


def observed_waits_s(waits: Iterable[tuple[str, float]]) -> dict[str, float]:
    """For each address what all but a few of the longest waits are below; none while only a few wait."""
    by_address: dict[str, list[float]] = {}
    for address, wait_s in waits:
        by_address.setdefault(address, []).append(wait_s)
    return {address: sorted(waits_s)[-NUM_LATE] for address, waits_s in by_address.items() if len(waits_s) >= NUM_LATE}


def lasting_s(decoding: Iterable[tuple[str, float]]) -> dict[str, float]:
    """For each address how long half of its requests are being decoded already; none for a few.

    When load rises, those that ended were quick: what runs knows sooner that a full batch is slow.
    """
    by_address: dict[str, list[float]] = {}
    for address, age_s in decoding:
        by_address.setdefault(address, []).append(age_s)
    return {address: median_low(ages_s) for address, ages_s in by_address.items() if len(ages_s) >= NUM_LATE}


def prefill_wait_s(worker: Worker) -> float:
    """Seconds until the worker has computed the prompts that it has."""
    rate = worker.beat.full_tokens_per_s if worker.beat else 0.0
    return worker.num_queued_tokens / rate if rate > 0 else 0.0


def decode_wait_s(worker: Worker, least_s: float = 0.0) -> float:
    """Seconds until the worker has a place in its batch for one more: Little's law over those who wait before it.

    Requests take `least_s` there at least.
    """
    beat, hello = worker.beat, worker.hello
    if beat is None or hello is None:
        return 0.0
    num_places = max(1, hello.max_num_seqs)
    if beat.num_waiting and worker.num_available_blocks < SCARCE * hello.num_blocks:
        num_places = max(1, beat.num_running + beat.num_transferring)
    num_before = worker.num_requests + 1 - num_places
    return max(0, num_before) * max(worker.service_s, least_s) / num_places


def predicted_wait_s(
    prefill: Sequence[Worker],
    decode: Sequence[Worker],
    observed: Mapping[str, float] = NOTHING,
    slowness: Mapping[str, float] = NOTHING,
    lasting: Mapping[str, float] = NOTHING,
) -> float:
    """Seconds that a new request would wait at the best of the ready workers, all of its own work left out.

    `observed` says by address how long others wait there already, `slowness` how many times longer than predicted
    first tokens took there lately, `lasting` how long requests there are being decoded.
    """

    def first_s(worker: Worker) -> float:
        predicted_s = prefill_wait_s(worker) * slowness.get(worker.address, 1.0)
        return max(predicted_s, observed.get(worker.address, 0.0))

    first = min(map(first_s, prefill or decode), default=0.0)
    place = min((decode_wait_s(worker, lasting.get(worker.address, 0.0)) for worker in decode), default=0.0)
    return max(first, place)


def refusal(wait_s: float, *, max_wait_s: float, slo_ttft_s: float = 0.0) -> Overloaded | None:
    """The error for a request that would wait longer than it may; None for one to be taken. `slo_ttft_s` 0: no SLO."""
    limit_s = min(max_wait_s, slo_ttft_s) if slo_ttft_s > 0 else max_wait_s
    if wait_s <= limit_s:
        return None
    why = f"a new request would wait about {wait_s:.1f} s, the most it may is {limit_s:g} s"
    return Overloaded(why, retry_after_s=min(MAX_RETRY_AFTER_S, max(1.0, wait_s - limit_s)))
