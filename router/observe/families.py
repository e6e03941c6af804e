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

    def gauge(self, name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self.common, *labels])
        return self._filled(family, samples)

    def counter(self, name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self.common, *labels])
        return self._filled(family, samples)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Metric:
        for labels, value in samples:
            family.add_metric([*self.common.values(), *labels], value)
        return family
