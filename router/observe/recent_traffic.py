"""Recent traffic of this router for `/load` and `diptych top`: rates and latency percentiles. Pure: takes `now`.

    first token ─> TTFT, tokens      later tokens ─> gaps, tokens      end ─> TPOT, wait, KV transfer, requests

Rates cover the last ten seconds, so that changes are visible at once. Percentiles cover the last five minutes, so that
the tail has enough requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.observe import RecentQuantile, SlidingWindow, quantiles_of
from router.observe.request_record import ChoiceRecord, RequestRecord

RATE_S = 10
"""Window of rates, in seconds."""
WINDOW_S = 300.0
"""Window of percentiles, in seconds."""
SHARES = (0.5, 0.9, 0.99)
KINDS = ("ttft", "tpot", "itl", "queue", "transfer", "exposed_transfer")
"""Latencies in `Traffic`."""


@dataclass(slots=True)
class _Second:
    num_requests: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_transfers: int = 0
    transfer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of `num` observations, in milliseconds, up to 5 % too large; 0 without observations."""

    num: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Averages per second over the last `RATE_S` seconds. `failed_per_s` counts requests that ended with an error."""

    requests_per_s: float
    failed_per_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    output_tokens_per_s: float
    transfers_per_s: float
    transfer_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic summary. `itl` is the time between tokens, `tpot` its mean per answer, `queue` the waiting time.

    `transfer` is the time from the grant of a KV transfer to its last block. `exposed_transfer` is the part that
    delayed the second token.
    """

    rate_s: float
    window_s: float
    rates: Rates
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    queue: Percentiles
    transfer: Percentiles
    exposed_transfer: Percentiles


class RecentTraffic:
    """Recorder of recent traffic, with constant memory. Use from the router's event loop."""

    def __init__(self) -> None:
        self._seconds = SlidingWindow(RATE_S + 1, RATE_S + 1, _Second)
        self._first_at: float | None = None
        self.ended_at: float | None = None
        """Time of the end of the latest request."""
        self._times = {kind: RecentQuantile(WINDOW_S) for kind in KINDS}
        self._ttft, self._tpot, self._itl, self._queue, self._transfer, self._exposed = self._times.values()

    # ------------------------------------------------------------ recording

    def first_tokens(self, ttft_s: float, num_tokens: int, now: float) -> None:
        """Record the first tokens of an answer, `ttft_s` after its request."""
        self._ttft.observe(ttft_s, now)
        self._now(now).num_output_tokens += num_tokens

    def tokens(self, gap_s: float, num_tokens: int, now: float) -> None:
        """Record later tokens, `gap_s` after the previous ones."""
        self._itl.observe(gap_s / num_tokens, now, num_tokens)
        self._now(now).num_output_tokens += num_tokens

    def ended(self, record: RequestRecord, now: float) -> None:
        """Record the end of a request. If the client disconnected, it counts neither as served nor as failed."""
        second = self._now(now)
        self.ended_at = now
        if record.error is not None:
            second.num_failed += 1
        elif not record.client_left:
            second.num_requests += 1
        if record.is_answered:
            second.num_prompt_tokens += record.num_prompt_tokens
            second.num_cached_tokens += record.num_cached_tokens
        for choice in record.choices:
            if choice.finish_reason:
                self._choice_ended(choice, second, now)

    def _choice_ended(self, choice: ChoiceRecord, second: _Second, now: float) -> None:
        if choice.num_tokens > 1:
            self._tpot.observe((choice.last_at - choice.first_at) / (choice.num_tokens - 1), now)
        if (line := choice.timeline) is None:
            return
        self._queue.observe(line.queue_s, now)
        if line.transfer_s > 0:
            self._transfer.observe(line.transfer_s, now)
            self._exposed.observe(line.exposed_transfer_s, now)
            second.num_transfers += 1
            second.transfer_bytes += line.transfer_bytes

    # ------------------------------------------------------------ summaries

    def summary(self, now: float) -> Traffic:
        """Return rates and percentiles."""
        return Traffic(float(RATE_S), WINDOW_S, self._rates(now), **percentiles_of(self.counts(now)))

    def counts(self, now: float) -> dict[str, list[int]]:
        """Return the histogram of each kind of latency. Histograms of several processes can be added."""
        return {kind: times.counts(now) for kind, times in self._times.items()}

    def _rates(self, now: float) -> Rates:
        """Compute rates from complete seconds. The current second would make every rate too low."""
        seen_s = 0 if self._first_at is None else min(RATE_S, int(now) - int(self._first_at))
        seconds = [one for one in self._seconds.series(now)[:-1] if one is not None] if seen_s else []

        def rate(counts: Sequence[int]) -> float:
            return sum(counts) / seen_s if seen_s else 0.0

        return Rates(
            requests_per_s=rate([one.num_requests for one in seconds]),
            failed_per_s=rate([one.num_failed for one in seconds]),
            prompt_tokens_per_s=rate([one.num_prompt_tokens for one in seconds]),
            cached_tokens_per_s=rate([one.num_cached_tokens for one in seconds]),
            output_tokens_per_s=rate([one.num_output_tokens for one in seconds]),
            transfers_per_s=rate([one.num_transfers for one in seconds]),
            transfer_bytes_per_s=rate([one.transfer_bytes for one in seconds]),
        )

    def _now(self, now: float) -> _Second:
        self._first_at = now if self._first_at is None else self._first_at
        return self._seconds.current(now)


def percentiles_of(counts: Mapping[str, Sequence[int]]) -> dict[str, Percentiles]:
    """Compute the percentiles of each kind of latency."""
    found = {}
    for kind, by_bucket in counts.items():
        num, (p50_s, p90_s, p99_s) = quantiles_of(by_bucket, SHARES)
        found[kind] = Percentiles(num, p50_s * 1e3, p90_s * 1e3, p99_s * 1e3)
    return found
