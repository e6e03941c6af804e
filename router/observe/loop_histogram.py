"""A histogram for what happens with every token: Prometheus's own takes two locks, and looks through its buckets."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """Owned by the event loop, which also reads it: the same samples as `prometheus_client.Histogram` has."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)  # the last: above all bounds
        self._sum, self._created = 0.0, time.time()

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` observations of the same value."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += count * seconds

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
        yield family
