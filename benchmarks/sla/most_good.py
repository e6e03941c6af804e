"""The most requests that any system could serve within the goal for a first token: a bound, not a policy. Pure.

It knows all requests and all prefixes in advance, one cache holds everything, answers take no time, and every worker
computes prompts at the rate of a prefill worker's full steps. All workers together are one that is as fast as all of
them. Since prompts that come earlier are due earlier, the most of them that are in time is then found exactly: add them
as they come, and whenever one would be late, leave out the one without which the others end soonest (Kise, Ibaraki and
Mine, "A solvable case of the one-machine scheduling problem with ready and due times", Operations Research, 1978).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def most_good(arrivals_s: Sequence[float], prompts_s: Sequence[float], goal_s: float, speed: float) -> int:
    """How many prompts are in time at most, `speed` seconds of them computed in a second.

    Arrivals are in order. A prompt that takes longer than the goal on a worker of its own cannot be in time.
    """
    kept: list[tuple[float, float]] = []  # when it came, and seconds of all workers
    begins: list[float] = []
    end = 0.0
    for at, seconds in zip(arrivals_s, prompts_s, strict=True):
        if seconds > goal_s:
            continue
        begins.append(max(end, at))
        kept.append((at, seconds / speed))
        end = begins[-1] + seconds / speed
        if end > at + goal_s:
            del kept[_most_gained(kept, begins)]
            begins, end = _begins(kept)
    return len(kept)


def _most_gained(kept: Sequence[tuple[float, float]], begins: Sequence[float]) -> int:
    """The place of the prompt without which the others end soonest; each begins at its arrival at the earliest."""
    best, most, spare = len(kept) - 1, 0.0, math.inf
    for place in range(len(kept) - 1, -1, -1):
        if (gained := min(kept[place][1], spare)) > most:
            best, most = place, gained
        spare = min(spare, begins[place] - kept[place][0])
    return best


def _begins(kept: Sequence[tuple[float, float]]) -> tuple[list[float], float]:
    """When each begins, and when the last one ends."""
    begins, end = [], 0.0
    for at, seconds in kept:
        begins.append(max(end, at))
        end = begins[-1] + seconds
    return begins, end
