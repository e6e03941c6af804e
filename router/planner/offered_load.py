"""What clients ask for, served or not: the load that pools are sized for. Pure: `now` comes in.

`LoadWindow` measures it: arrivals of the last two minutes, and a sample of recent requests. A refused request is load
as well: a pool that is sized by what it serves stays as small as it is.
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
    """One recent request: tokens of its prompt, those of them that a prefix cache held, tokens of its answer."""

    num_prompt: int
    num_cached: int
    num_output: int

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that were computed: at least the last one."""
        return max(1, self.num_prompt - self.num_cached)

    @property
    def prompt(self) -> StepShape:
        """The same, as what a step computes."""
        return StepShape.of_prompt(self.num_prompt - self.num_uncached, self.num_prompt)


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests a second, refused ones included, and a sample of them, each as likely as the others.

    `rate` is that of the last minute. `rate_ahead`, at least `rate`, is expected once a worker that is started now is
    ready. `burstiness`: the variance of the number of arrivals over its mean, 1 for independent clients; the squared
    coefficient of variation of the times between arrivals comes to the same over long windows. Nothing has arrived for
    `idle_s` seconds.
    """

    rate: float = 0.0
    rate_ahead: float = 0.0
    burstiness: float = 1.0
    requests: tuple[SampledRequest, ...] = ()
    idle_s: float = 0.0

    def at(self, rate: float) -> OfferedLoad:
        """The same requests at another rate."""
        return replace(self, rate=rate, rate_ahead=rate)

    def split(self, threshold: int) -> tuple[OfferedLoad, OfferedLoad]:
        """The load whose prompts prefill workers compute, and the load whose prompts, of at most `threshold` uncached
        tokens, decode workers compute themselves."""
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
"""Slots of the rate: a minute. A burst shows in the latest ones before it shows in that."""
NUM_REMEMBERED, REMEMBERED_S, FEWEST_REMEMBERED = 1024, 300.0, 64
"""Requests that the sample is made of: the latest, none older than so long unless there are fewer than the third."""
NUM_SAMPLED = 40
"""Groups of requests whose averages stand for all: a forecast takes time in proportion to them."""
SIGNIFICANT = 3.0
"""Standard errors by which a rate must differ from the minute's before it counts as a burst or as a trend."""
SUDDEN = ((2, 4.0), (1, 5.0))
"""Fewer slots count as a burst as well, from so many standard errors on, which grow with the burstiness: they are asked
at each look, and what looks like a burst by chance keeps workers for the hold time."""
FEWEST_ARRIVALS = 20
"""For an estimate of burstiness."""
MOST_BURSTINESS = 8.0
"""More comes from one burst among few arrivals, and would size the pools for it for five minutes."""
ASSUMED_OUTPUT = 256
"""Tokens of an answer before the first has ended."""


@dataclass(slots=True)
class _Slot:
    num_arrived: int = 0


class LoadWindow:
    """Owned by the router's event loop. `quantile` is that of the measured tails."""

    def __init__(self, quantile: float = 0.95) -> None:
        self._arrivals = SlidingWindow(SLOT_S * NUM_SLOTS, NUM_SLOTS, _Slot)
        self._requests: deque[tuple[float, SampledRequest]] = deque(maxlen=NUM_REMEMBERED)
        self._served: deque[SampledRequest] = deque(maxlen=FEWEST_REMEMBERED)  # those that refused ones are taken for
        self._ttft, self._tpot = RecentQuantile(), RecentQuantile()
        self._quantile = quantile
        self._last_arrival: float | None = None
        self._first_at: float | None = None

    # ------------------------------------------------------------ what happens

    def arrived(self, now: float, num: int = 1) -> None:
        """Requests came, whatever becomes of them."""
        self._arrivals.current(now).num_arrived += num
        self._last_arrival = now
        self._first_at = now if self._first_at is None else self._first_at

    def refused(self, num_prompt: int, now: float) -> None:
        """A request was refused that would have computed this prompt, and answered like one of the latest served.

        Each like another one of these: many are refused in a row, and one answer says little of theirs.
        """
        known = self._served[0] if self._served else SampledRequest(num_prompt, 0, ASSUMED_OUTPUT)
        self._served.rotate(-1)
        cached = int(num_prompt * known.num_cached / known.num_prompt) if known.num_prompt else 0
        self._requests.append((now, SampledRequest(num_prompt, cached, known.num_output)))

    def ended(self, request: SampledRequest, now: float) -> None:
        """A request was served."""
        self._requests.append((now, request))
        self._served.append(request)

    def first_token(self, ttft_s: float, now: float) -> None:
        """A first token came `ttft_s` after its request."""
        self._ttft.observe(ttft_s, now)

    def token_time(self, tpot_s: float, now: float) -> None:
        """An answer's tokens after the first took `tpot_s` each."""
        self._tpot.observe(tpot_s, now)

    # ------------------------------------------------------------ what it comes to

    def tails_s(self, now: float) -> tuple[float, float]:
        """The measured TTFT and TPOT at the quantile over the last minute, in seconds; 0 without any."""
        return self._ttft.quantile(self._quantile, now), self._tpot.quantile(self._quantile, now)

    def offered(self, now: float, ahead_s: float) -> OfferedLoad:
        """The load now, and as it will be in `ahead_s` seconds if it goes on to grow as it does."""
        counts = self._counts(now)
        recent = counts[-NUM_RECENT:]
        seen_s = SLOT_S * len(recent)
        rate = sum(recent) / seen_s if recent else 0.0
        now_rate = max([rate, *_bursts(counts, rate)])
        level, slope = _trend(counts)
        ahead = max(now_rate, level + slope * ahead_s) if slope > 0 else now_rate
        return OfferedLoad(
            rate=rate,
            rate_ahead=min(ahead, 4.0 * now_rate),  # nothing is known of what lies further ahead
            burstiness=burstiness(counts),
            requests=self._sample(now),
            idle_s=math.inf if self._last_arrival is None else now - self._last_arrival,
        )

    def _counts(self, now: float) -> list[int]:
        """Arrivals by slot, oldest first: complete slots, and since the first arrival only.

        The slot of the first arrival is not a whole one; it counts only while there is no other.
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
    """Averages of groups of requests of about one length, `NUM_SAMPLED` at most.

    A random sample of so few would change from look to look, and the pools with it.
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
    """Rates of the latest slots that are above the `rate` of the minute by more than chance.

    One slot may do: a fourfold load that lasts for five seconds is no chance, and workers take long to start.
    """
    chance = rate * burstiness(counts)
    for num, errors, variance in ((NUM_LATEST, SIGNIFICANT, rate), *((*sudden, chance) for sudden in SUDDEN)):
        latest_s = SLOT_S * num
        found = sum(counts[-num:]) / latest_s
        if len(counts) >= num and found > rate + errors * math.sqrt(variance / latest_s):
            yield found


def _trend(counts: list[int]) -> tuple[float, float]:
    """(rate now, its growth a second) by least squares; (0, 0) unless the growth is significant.

    Arrivals of independent clients: the variance of a slot's number is its mean.
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
    """Variance over mean of the numbers of arrivals, from differences of neighbours, which a trend does not change.

    The largest is left out: it may be the one step of a load that is steady before and after.
    """
    total = sum(counts)
    if total < FEWEST_ARRIVALS or len(counts) < 2 * NUM_LATEST:
        return 1.0
    differences = sorted((after - before) ** 2 for before, after in zip(counts, counts[1:], strict=False))[:-1]
    found = sum(differences) / len(differences) / 2 * len(counts) / total
    chance = 2.0 * math.sqrt(3.0 / len(differences))  # two standard errors of the estimate where the truth is 1
    return min(MOST_BURSTINESS, max(1.0, found - chance))
