"""Families of Prometheus metrics that a collector makes at scrape time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values by those labels that differ between the samples of a family."""


@dataclass(frozen=True, slots=True)
class Families:
    """`common`: the labels that all samples have."""

    common: Mapping[str, str]

    def gauge(self, name: str, text: str, samples: Samples | float, labels: tuple[str, ...] = ()) -> Metric:
        """One value, or values by `labels`."""
        return self._filled(GaugeMetricFamily(name, text, labels=[*self.common, *labels]), samples)

    def counter(self, name: str, text: str, samples: Samples | float, labels: tuple[str, ...] = ()) -> Metric:
        """One value, or values by `labels`."""
        return self._filled(CounterMetricFamily(name, text, labels=[*self.common, *labels]), samples)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, samples: Samples | float) -> Metric:
        for labels, value in [((), samples)] if isinstance(samples, int | float) else samples:
            family.add_metric([*self.common.values(), *labels], value)
        return family
