"""Tries rates on a server for `diptych bench --find-rate`: sends a load, decides as early as it can, lets it drain."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.load.client import CompletionClient
from benchmarks.load.find_rate import RateSearch, Trial, Verdict
from benchmarks.load.load import Load
from benchmarks.load.summary import RequestRecord, percentile
from benchmarks.load.workload import Workload, poisson_arrivals

LOOK_S = 0.05
NUM_LONE, LONE_INDEX, TRIAL_INDEXES = 20, 10**8, 10**6
"""Requests of a trial have indices, and so prompts, of their own: no prefix cache holds them."""
FILLING = 0.1
"""The first requests of a trial, as a share of the least that are judged, meet a queue that is not filled yet."""
MOST_TRIAL_S, DRAIN_S = 600.0, 60.0


@dataclass(frozen=True, slots=True)
class Goals:
    """Milliseconds; 0: no such goal. `quantile`: the share of requests that should meet both."""

    ttft_ms: float
    tpot_ms: float
    quantile: float

    def outcome(self, record: RequestRecord, now: float) -> bool | None:
        """Whether a request met both goals; None while that is open."""
        if record.outcome:
            return record.meets(self.ttft_ms, self.tpot_ms)
        waited_s = (record.token_times[0] if record.token_times else now) - record.start
        return False if self.ttft_ms and waited_s * 1000 > self.ttft_ms else None


@dataclass(frozen=True, slots=True)
class Probe:
    """A trial: `rate` in requests a second, 0 for one request at a time. Latencies are those at the goals' quantile."""

    rate: float
    seconds: float
    verdict: Verdict
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class FoundRate:
    """`rate` is the highest that held, 0 if none did; `missed` the lowest that missed, infinity if none did."""

    rate: float
    missed: float
    probes: Sequence[Probe]

    @classmethod
    def so_far(cls, probes: Sequence[Probe]) -> FoundRate:
        """What the trials of a search say that was not finished."""
        tried = [probe for probe in probes if probe.rate]
        held = [probe.rate for probe in tried if probe.verdict.holds]
        missed = [probe.rate for probe in tried if not probe.verdict.holds]
        return cls(max(held, default=0.0), min(missed, default=math.inf), probes)


class Prober:
    """Finds the rate for one server. `most_trial_s` bounds the seconds of each trial."""

    def __init__(
        self,
        client: CompletionClient,
        workload: Workload,
        goals: Goals,
        *,
        least: int,
        seed: int,
        most_trial_s: float = MOST_TRIAL_S,
        on_probe: Callable[[Probe], None] = lambda probe: None,
    ) -> None:
        self.probes: list[Probe] = []
        self._client, self._workload, self._goals = client, workload, goals
        self._least, self._seed, self._most_trial_s = least, seed, most_trial_s or MOST_TRIAL_S
        self._on_probe = on_probe
        self._lone_indexes = itertools.count(LONE_INDEX)

    async def find(self, first: float, tolerance: float) -> FoundRate:
        """Search from the rate `first`; 0: from that of one request at a time.

        Where one request at a time misses the goals for sure, no rate is tried.
        """
        lone = await self._lone()
        self._add(lone)
        if lone.verdict.is_sure and not lone.verdict.holds:
            return FoundRate(0.0, 0.0, self.probes)
        search = RateSearch(first or lone.verdict.num / lone.seconds, tolerance)
        while (rate := search.next_rate) is not None:
            probe = await self._at(rate, len(self.probes), explores=math.isinf(search.missed))
            search.observe(rate, probe.verdict.holds)
            self._add(probe)
            await self._drain()
        return FoundRate(search.held, search.missed, self.probes)

    def _add(self, probe: Probe) -> None:
        self.probes.append(probe)
        self._on_probe(probe)

    async def _lone(self) -> Probe:
        """One request at a time."""
        began = time.perf_counter()
        load = Load(self._client, self._workload, num_requests=NUM_LONE, first_index=next(self._lone_indexes))
        self._lone_indexes = itertools.count(LONE_INDEX + NUM_LONE)
        await load.closed_loop(1)
        trial = Trial(self._goals.quantile, NUM_LONE, extensions=0)
        return self._probe(0.0, began, load.records, trial.end(self._outcomes(load.records)))

    async def _at(self, rate: float, number: int, explores: bool) -> Probe:
        """A trial of one rate; what is in flight when it is decided is cancelled."""
        num_filling = math.ceil(self._least * FILLING)
        trial = Trial(self._goals.quantile, self._least, explores=explores)
        load = Load(self._client, self._workload, first_index=number * TRIAL_INDEXES)
        sending = asyncio.create_task(load.open_loop(self._arrivals(rate, number)))
        began, verdict = time.perf_counter(), None
        try:
            while verdict is None:
                await asyncio.wait([sending], timeout=LOOK_S)
                if sending.done():
                    sending.result()  # arrivals have no end: it has failed
                verdict = trial.look(self._outcomes(load.records[num_filling:]))
                if time.perf_counter() - began > self._most_trial_s:
                    break
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        judged = load.records[num_filling:]
        return self._probe(rate, began, judged, verdict or trial.end(self._outcomes(judged)))

    def _arrivals(self, rate: float, number: int) -> Iterator[float]:
        return poisson_arrivals(rate, self._seed + number)

    def _outcomes(self, records: Sequence[RequestRecord]) -> list[bool | None]:
        now = time.perf_counter()
        return [self._goals.outcome(record, now) for record in records]

    def _probe(self, rate: float, began: float, records: Sequence[RequestRecord], verdict: Verdict) -> Probe:
        judged = records[: verdict.num]
        q = self._goals.quantile * 100
        ttfts = sorted(record.ttft_s for record in judged if record.token_times)
        tpots = sorted(record.tpot_s for record in judged if record.ok and not math.isnan(record.tpot_s))
        return Probe(
            rate,
            time.perf_counter() - began,
            verdict,
            percentile(ttfts, q) * 1000 if ttfts else math.nan,
            percentile(tpots, q) * 1000 if tpots else math.nan,
        )

    async def _drain(self) -> None:
        """Send single requests until one meets the goals: then the queue of the last trial is gone."""
        end = time.perf_counter() + DRAIN_S
        while time.perf_counter() < end:
            load = Load(self._client, self._workload, num_requests=1, first_index=next(self._lone_indexes))
            await load.closed_loop(1)
            if self._outcomes(load.records)[0]:
                return
