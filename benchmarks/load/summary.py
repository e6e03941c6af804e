"""Latency and throughput of a run, from one record a request.

start ──── TTFT ────> first token ── ITL ─> ── ITL ─> ... last token        e2e = last token - start
                                  TPOT = (last token - first token) / (output tokens - 1)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

OK = "ok"
INTERRUPTED = "interrupted"
QUANTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are in seconds of one monotonic clock; `token_times` has one entry a text event.

    `outcome` is "ok", "http 503" (any status but 200), "connect", "timeout", "stream error" (an error event after the
    200), "truncated" (the stream ended without its end mark) or "interrupted".
    """

    index: int
    start: float = 0.0
    late_s: float = 0.0
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    outcome: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.start if self.token_times else math.nan

    @property
    def e2e_s(self) -> float:
        return self.token_times[-1] - self.start if self.token_times else math.nan

    @property
    def tpot_s(self) -> float:
        """NaN for outputs of one token."""
        if self.output_tokens < 2 or len(self.token_times) < 2:
            return math.nan
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        return [late - early for early, late in zip(self.token_times, self.token_times[1:], strict=False)]

    def meets(self, slo_ttft_ms: float, slo_tpot_ms: float) -> bool:
        """Whether both SLOs hold; an SLO of 0 is none, and outputs of one token have no TPOT."""
        if not self.ok:
            return False
        ttft_met = not slo_ttft_ms or self.ttft_s * 1000 <= slo_ttft_ms
        return ttft_met and not (slo_tpot_ms and self.tpot_s * 1000 > slo_tpot_ms)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a latency, in milliseconds; all zero without samples."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> Distribution:
        """Without the values that are NaN."""
        ordered = sorted(value * 1000 for value in values if not math.isnan(value))
        if not ordered:
            return cls()
        mean = math.fsum(ordered) / len(ordered)
        p50, p90, p95, p99 = (percentile(ordered, q) for q in QUANTILES)
        return cls(len(ordered), mean, p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Rates count requests that succeeded, over `duration_s`: first start to last token."""

    num_requests: int
    outcomes: dict[str, int]
    messages: dict[str, str]
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    request_rate: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput: float
    num_good: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    late_ms: Distribution

    @property
    def num_ok(self) -> int:
        return self.outcomes.get(OK, 0)


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of ascending values, linear between the two nearest ranks."""
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(records: Sequence[RequestRecord], *, slo_ttft_ms: float = 0.0, slo_tpot_ms: float = 0.0) -> Summary:
    """Summarise a run; failed requests count in `outcomes` only."""
    good = [record for record in records if record.ok]
    num_good = sum(record.meets(slo_ttft_ms, slo_tpot_ms) for record in good)
    ends = [record.token_times[-1] for record in good if record.token_times]
    duration_s = max(ends) - min(record.start for record in good) if ends else 0.0

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    input_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    return Summary(
        num_requests=len(records),
        outcomes=dict(Counter(record.outcome for record in records)),
        messages={record.outcome: record.message for record in reversed(records) if not record.ok and record.message},
        duration_s=duration_s,
        input_tokens=input_tokens,
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=output_tokens,
        request_rate=rate(len(good)),
        input_tokens_per_s=rate(input_tokens),
        output_tokens_per_s=rate(output_tokens),
        goodput=rate(num_good),
        num_good=num_good,
        ttft_ms=Distribution.of_seconds(record.ttft_s for record in good),
        tpot_ms=Distribution.of_seconds(record.tpot_s for record in good),
        itl_ms=Distribution.of_seconds(gap for record in good for gap in record.itls_s),
        e2e_ms=Distribution.of_seconds(record.e2e_s for record in good),
        late_ms=Distribution.of_seconds(record.late_s for record in records),
    )
