"""The least latency of a server whose one thread takes a constant time for each token. Pure.

evenly  a burst comes when the one before is done: its j-th token waits for the j - 1 before it
random  bursts come at random times, as those of engines that know nothing of each other (M/D/1 with bursts)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

NUM_BURSTS: Final = 100_000
SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds from a burst's arrival to the end of a token's turn."""

    p50_s: float
    p99_s: float


def evenly_spaced(burst: float, work_s: float) -> Floor:
    """Bursts of so many tokens, of `work_s` each, that never meet."""
    return Floor(_place(burst, 0.5) * work_s, _place(burst, 0.99) * work_s)


def at_random(burst: float, work_s: float, tokens_per_s: float) -> Floor:
    """The same bursts at random times (Lindley's recursion, drawn); without end if there is more work than time."""
    if work_s * tokens_per_s >= 1.0:
        return Floor(np.inf, np.inf)
    random, places = np.random.default_rng(SEED), max(1, round(burst))
    gaps = random.exponential(burst / tokens_per_s, NUM_BURSTS)
    walk = np.concatenate(([0.0], np.cumsum(burst * work_s - gaps)))
    waits = walk - np.minimum.accumulate(walk)
    turns = work_s * random.integers(1, places + 1, len(waits))
    p50, p99 = np.quantile(waits + turns, (0.5, 0.99))
    return Floor(float(p50), float(p99))


def _place(burst: float, share: float) -> float:
    """The place in the burst that this share of its tokens does not exceed."""
    return max(1.0, float(np.ceil(share * burst)))
