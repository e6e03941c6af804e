"""The load of the last hour in steps of ten seconds, for the charts of the dashboard. Pure: takes wall-clock time.

Each point has one number per name in `NAMES`, in 4 bytes, so an hour of a model takes about 50 KiB.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

STEP_S: Final = 10
"""Seconds between points."""
HISTORY_S: Final = 3600
"""Seconds that are kept."""
MAX_MODELS: Final = 32
"""Models with their own history. Further ones are only part of the total."""
SUMMED: Final = ("inFlight", "waiting", "requests", "failed", "output", "prompt", "transferBytes")
"""Numbers that are added over processes."""
LEAST: Final = ("ttftMet", "tpotMet")
"""Numbers of which the lowest counts. Of all others, the highest does."""
NAMES: Final = (
    *SUMMED,
    *LEAST,
    *("ttft50", "ttft99", "tpot50", "tpot99", "prefillKv", "decodeKv", "transfer50"),
)
Point = Mapping[str, float | None]


class LoadHistory:
    """Points by model; the name "" is for all models together. `started_at` is the start of the process."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self._points: dict[str, deque[tuple[int, array[float]]]] = {}

    def add(self, model: str, point: Point, now: float) -> None:
        """Record a point, unless the current step has one."""
        kept = self._points.get(model)
        if kept is None:
            if len(self._points) > MAX_MODELS:
                return
            kept = self._points[model] = deque(maxlen=HISTORY_S // STEP_S)
        step = int(now // STEP_S)
        if not kept or kept[-1][0] < step:
            values = (point[name] for name in NAMES)
            kept.append((step, array("f", (math.nan if one is None else one for one in values))))

    def body(self, model: str, now: float) -> dict[str, Any]:
        """Return the points of the last hour, the oldest first, with the end of each step in Unix seconds."""
        oldest = int(now // STEP_S) - HISTORY_S // STEP_S
        points = [
            {"at": (step + 1) * STEP_S}
            | {name: None if math.isnan(value) else value for name, value in zip(NAMES, values, strict=True)}
            for step, values in self._points.get(model, ())
            if step > oldest
        ]
        return {"step_s": STEP_S, "started_at": self.started_at, "points": points}


def merged_history(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the histories of several processes. Counts and rates are added; of percentiles, the highest is shown."""
    by_time: dict[int, list[Point]] = {}
    for body in bodies:
        for point in body["points"]:
            by_time.setdefault(point["at"], []).append(point)
    points = [{"at": at} | {name: _merged(name, same) for name in NAMES} for at, same in sorted(by_time.items())]
    return {"step_s": STEP_S, "started_at": min(body["started_at"] for body in bodies), "points": points}


def _merged(name: str, points: Sequence[Point]) -> float | None:
    values = [value for point in points if (value := point[name]) is not None]
    if not values:
        return None
    return sum(values) if name in SUMMED else min(values) if name in LEAST else max(values)
