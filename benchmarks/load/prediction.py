"""How far a router's predictions were off during a run, from its histograms of measured over predicted times."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

RATIOS = {"TTFT": "diptych_ttft_prediction_ratio", "TPOT": "diptych_tpot_prediction_ratio"}
POINTS = 40
"""Ratios within one bucket are taken to be spread evenly, at so many points."""

Buckets = Mapping[float, float]
"""Upper bound of a bucket -> observations up to it."""


@dataclass(frozen=True, slots=True)
class PredictionError:
    """|predicted - measured| / measured of a run's requests, at two quantiles. `ratio_p50`: measured over predicted."""

    num: int
    p50: float
    p90: float
    ratio_p50: float


def buckets_of(text: str, name: str) -> dict[float, float]:
    """A histogram in Prometheus text, over all its labels; empty when it is not there."""
    found: dict[float, float] = {}
    for labels, value in re.findall(rf"^{re.escape(name)}_bucket\{{([^}}]*)\}} (\S+)", text, re.MULTILINE):
        bound = re.search(r'(?:^|,)le="([^"]+)"', labels)
        if bound:
            found[float(bound[1])] = found.get(float(bound[1]), 0.0) + float(value)
    return found


def error_between(before: Buckets, after: Buckets) -> PredictionError | None:
    """The error of the observations between two readings of a histogram of ratios; None without any."""
    points: list[tuple[float, float, float]] = []  # error, ratio, weight
    low = counted = 0.0
    for high in sorted(after):
        total = after[high] - before.get(high, 0.0)
        weight, counted = total - counted, total
        for point in range(POINTS if weight > 0 else 0):
            ratio = low + ((2 * low if math.isinf(high) else high) - low) * (point + 0.5) / POINTS
            points.append((abs(1 / ratio - 1), ratio, weight / POINTS))
        low = high
    if counted < 1:
        return None
    errors = [(error, weight) for error, _, weight in points]
    ratios = [(ratio, weight) for _, ratio, weight in points]
    return PredictionError(round(counted), _quantile(errors, 0.5), _quantile(errors, 0.9), _quantile(ratios, 0.5))


def errors_between(before: str, after: str) -> dict[str, PredictionError]:
    """By TTFT and TPOT, from what `/metrics` said before and after a run; nothing for other servers."""
    found = {
        name: error_between(buckets_of(before, metric), buckets_of(after, metric)) for name, metric in RATIOS.items()
    }
    return {name: error for name, error in found.items() if error is not None}


def _quantile(values: list[tuple[float, float]], quantile: float) -> float:
    left = quantile * math.fsum(weight for _, weight in values)
    for value, weight in sorted(values):
        left -= weight
        if left <= 0:
            return value
    return max(value for value, _ in values)
