"""Offered load: what clients ask for, whether served or not. Pools are sized for it. Pure.

`LoadWindow` measures the arrivals of the last two minutes and samples recent requests. Rejected requests count, because
a pool sized by what it serves would never grow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from common.latency import StepShape
from common.observe import RecentQuantile, SlidingWindow


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """A recent request: tokens of its prompt, cached ones among them, and tokens of its answer."""

    num_prompt: int
    num_cached: int
    num_output: int

    @property
    def num_uncached(self) -> int:
        """Number of computed prompt tokens: at least the last one."""
        return max(1, self.num_prompt - self.num_cached)

    @property
    def prompt(self) -> StepShape:
        """The computed part of the prompt."""
        return StepShape.of_prompt(self.num_prompt - self.num_uncached, self.num_prompt)


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Request rate, including rejected requests, and a sample of equally likely requests.

    `rate` is the rate of the last minute, per second. `rate_ahead`, at least `rate`, is predicted for the time when a
    worker started now is ready. `burstiness` is the variance of the number of arrivals over its mean: 1 for independent
    clients. Over long windows it equals the squared coefficient of variation of the times between arrivals. `idle_s` is
    the time since the last arrival.
    """

    rate: float = 0.0
    rate_ahead: float = 0.0
    burstiness: float = 1.0
    requests: tuple[SampledRequest, ...] = ()
    idle_s: float = 0.0

    def at(self, rate: float) -> OfferedLoad:
        """Return the same requests at another rate."""
        return replace(self, rate=rate, rate_ahead=rate)

    def split(self, threshold: int) -> tuple[OfferedLoad, OfferedLoad]:
        """Split the load by whether prefill workers compute the prompts.

        Decode workers compute prompts of at most `threshold` uncached tokens themselves.
        """
        remote = tuple(one for one in self.requests if one.num_uncached > threshold)
        local = tuple(one for one in self.requests if one.num_uncached <= threshold)
        share = len(remote) / len(self.requests) if self.requests else 1.0
        return (
            replace(self, rate=self.rate * share, rate_ahead=self.rate_ahead * share, requests=remote),
            replace(self, rate=self.rate * (1 - share), rate_ahead=self.rate_ahead * (1 - share), requests=local),
        )


SLOT_S, NUM_SLOTS = 5.0, 24
"""Two minutes in slots of five seconds."""
NUM_RECENT, NUM_LATEST = 12, 3
"""Slots of the rate, one minute, and the latest ones, in which a burst shows first."""
NUM_REMEMBERED, REMEMBERED_S, FEWEST_REMEMBERED = 1024, 300.0, 64
"""Size and maximum age of the sample. The third number is kept whatever its age."""
NUM_SAMPLED = 40
"""Number of groups whose averages represent all requests. The cost of a forecast is proportional to it."""
SIGNIFICANT = 3.0
"""Standard errors by which a rate must differ from the minute's to count as a burst or trend."""
SUDDEN = ((2, 4.0), (1, 5.0))
"""Fewer slots also count as a burst, above a number of standard errors that grow with the burstiness. They are checked
in each round, and a false burst keeps workers for the hold time."""
FEWEST_ARRIVALS = 20
"""Minimum number of arrivals for an estimate of burstiness."""
MOST_BURSTINESS = 8.0
"""Maximum burstiness. Higher values come from a single burst among few arrivals, and would affect the pools for
minutes."""
ASSUMED_OUTPUT = 256
"""Assumed tokens of an answer before the first has ended."""


@dataclass(slots=True)
class _Slot:
    num_arrived: int = 0


class LoadWindow:
    """Measures the offered load.

    Not thread-safe: use only from the event loop. `quantile` applies to measured tails.
    """

    def __init__(self, quantile: float = 0.95) -> None:
        self._arrivals = SlidingWindow(SLOT_S * NUM_SLOTS, NUM_SLOTS, _Slot)
        self._requests: deque[tuple[float, SampledRequest]] = deque(maxlen=NUM_REMEMBERED)
        self._served: deque[SampledRequest] = deque(maxlen=FEWEST_REMEMBERED)  # templates for rejected requests
        self._ttft, self._tpot = RecentQuantile(), RecentQuantile()
        self._quantile = quantile
        self._last_arrival: float | None = None
        self._first_at: float | None = None

    # ------------------------------------------------------------ observations

    def arrived(self, now: float, num: int = 1) -> None:
        """Record new requests, whatever their outcome."""
        self._arrivals.current(now).num_arrived += num
        self._last_arrival = now
        self._first_at = now if self._first_at is None else self._first_at

    def refused(self, num_prompt: int, now: float) -> None:
        """Record a rejected request with this prompt. Its answer is assumed to resemble a recently served one.

        Rejected requests use different served ones in turn, because many are rejected in a row.
        """
        known = self._served[0] if self._served else SampledRequest(num_prompt, 0, ASSUMED_OUTPUT)
        self._served.rotate(-1)
        cached = int(num_prompt * known.num_cached / known.num_prompt) if known.num_prompt else 0
        self._requests.append((now, SampledRequest(num_prompt, cached, known.num_output)))

    def ended(self, request: SampledRequest, now: float) -> None:
        """Record a served request."""
        self._requests.append((now, request))
        self._served.append(request)

    def first_token(self, ttft_s: float, now: float) -> None:
        """Record the time of a first token."""
        self._ttft.observe(ttft_s, now)

    def token_time(self, tpot_s: float, now: float) -> None:
        """Record the mean time of an answer's later tokens."""
        self._tpot.observe(tpot_s, now)

    # ------------------------------------------------------------ results

    def tails_s(self, now: float) -> tuple[float, float]:
        """Return measured TTFT and TPOT at the quantile over the last minute, in seconds; 0 without data."""
        return self._ttft.quantile(self._quantile, now), self._tpot.quantile(self._quantile, now)

    def offered(self, now: float, ahead_s: float) -> OfferedLoad:
        """Return the load now, and as predicted for `ahead_s` seconds from now by its trend."""
        counts = self._counts(now)
        recent = counts[-NUM_RECENT:]
        seen_s = SLOT_S * len(recent)
        rate = sum(recent) / seen_s if recent else 0.0
        now_rate = max([rate, *_bursts(counts, rate)])
        level, slope = _trend(counts)
        ahead = max(now_rate, level + slope * ahead_s) if slope > 0 else now_rate
        return OfferedLoad(
            rate=rate,
            rate_ahead=min(ahead, 4.0 * now_rate),  # limits the extrapolation
            burstiness=burstiness(counts),
            requests=self._sample(now),
            idle_s=math.inf if self._last_arrival is None else now - self._last_arrival,
        )

    def _counts(self, now: float) -> list[int]:
        """Return the arrivals of complete slots since the first arrival, oldest first.

        The slot of the first arrival is incomplete, so it counts only if there is no other.
        """
        if self._first_at is None:
            return []
        num_known = int(now / SLOT_S) - int(self._first_at / SLOT_S)
        slots = self._arrivals.series(now)[:-1][-num_known:] if num_known else []
        found = [slot.num_arrived if slot else 0 for slot in slots]
        return found[1:] if 1 < num_known == len(found) else found

    def _sample(self, now: float) -> tuple[SampledRequest, ...]:
        while len(self._requests) > FEWEST_REMEMBERED and self._requests[0][0] < now - REMEMBERED_S:
            self._requests.popleft()
        return averages([one for _, one in self._requests])


def averages(requests: Sequence[SampledRequest]) -> tuple[SampledRequest, ...]:
    """Return averages of up to `NUM_SAMPLED` groups of requests of similar length.

    A random sample of that size would change between rounds, and the pools with it.
    """
    ordered = sorted(requests, key=lambda one: (one.num_uncached, one.num_output))
    num_groups = min(NUM_SAMPLED, len(ordered))
    edges = [index * len(ordered) // num_groups for index in range(num_groups + 1)] if num_groups else []
    return tuple(_average(ordered[begin:end]) for begin, end in zip(edges, edges[1:], strict=False))


def _average(requests: Sequence[SampledRequest]) -> SampledRequest:
    sums = [
        sum(each) for each in zip(*((one.num_prompt, one.num_cached, one.num_output) for one in requests), strict=True)
    ]
    return SampledRequest(*(round(total / len(requests)) for total in sums))


def _bursts(counts: list[int], rate: float) -> Iterator[float]:
    """Iterate over rates of the latest slots that are significantly above the `rate` of the minute.

    A single slot may suffice: a fourfold load for five seconds is significant, and workers take long to start.
    """
    chance = rate * burstiness(counts)
    for num, errors, variance in ((NUM_LATEST, SIGNIFICANT, rate), *((*sudden, chance) for sudden in SUDDEN)):
        latest_s = SLOT_S * num
        found = sum(counts[-num:]) / latest_s
        if len(counts) >= num and found > rate + errors * math.sqrt(variance / latest_s):
            yield found


def _trend(counts: list[int]) -> tuple[float, float]:
    """Return (current rate, growth per second) by least squares; (0, 0) unless the growth is significant.

    For independent clients, the variance of a slot's count is its mean.
    """
    num = len(counts)
    if num < 2 * NUM_LATEST or not sum(counts):
        return 0.0, 0.0
    middle, mean = (num - 1) / 2, sum(counts) / num
    spread = sum((index - middle) ** 2 for index in range(num))
    slope = sum((index - middle) * count for index, count in enumerate(counts)) / spread
    if slope < SIGNIFICANT * math.sqrt(mean * burstiness(counts) / spread):
        return 0.0, 0.0
    return (mean + slope * (num - middle)) / SLOT_S, slope / SLOT_S**2


def burstiness(counts: list[int]) -> float:
    """Return the variance of arrivals over their mean, from differences of neighbours, which a trend does not affect.

    The largest difference is excluded, because it may be a step of an otherwise constant load.
    """
    total = sum(counts)
    if total < FEWEST_ARRIVALS or len(counts) < 2 * NUM_LATEST:
        return 1.0
    differences = sorted((after - before) ** 2 for before, after in zip(counts, counts[1:], strict=False))[:-1]
    found = sum(differences) / len(differences) / 2 * len(counts) / total
    chance = 2.0 * math.sqrt(3.0 / len(differences))  # two standard errors of the estimate if the true value is 1
    return min(MOST_BURSTINESS, max(1.0, found - chance))
