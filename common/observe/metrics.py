"""Prometheus metrics shared by routers and workers: buckets, families, counters of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
)
"""vLLM's buckets, with finer ones at the lower end."""
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values by the labels that differ between the samples of a family."""
KIND, POSITION = "kind", "position"


@dataclass(frozen=True, slots=True)
class Families:
    """Factory of metric families. `common`: labels of all samples."""

    common: Mapping[str, str]

    def gauge(self, name: str, text: str, samples: Samples | float, labels: tuple[str, ...] = ()) -> Metric:
        """Create a gauge with one value, or values by `labels`."""
        return self._filled(GaugeMetricFamily(name, text, labels=[*self.common, *labels]), samples)

    def counter(self, name: str, text: str, samples: Samples | float, labels: tuple[str, ...] = ()) -> Metric:
        """Create a counter with one value, or values by `labels`."""
        return self._filled(CounterMetricFamily(name, text, labels=[*self.common, *labels]), samples)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, samples: Samples | float) -> Metric:
        for labels, value in [((), samples)] if isinstance(samples, int | float) else samples:
            family.add_metric([*self.common.values(), *labels], value)
        return family


class DraftMetrics:
    """Counters of speculative decoding. With `kinds`, the first three have a label for the source of draft tokens."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str], kinds: Sequence[str] = ()) -> None:
        self._labels = labels
        source = f", by source: {', '.join(kinds)}" if kinds else ""
        names = [*labels, *((KIND,) if kinds else ())]
        self.drafts = Counter("vllm:spec_decode_num_drafts", f"Number of drafts{source}", names, registry=registry)
        self.tokens = Counter(
            "vllm:spec_decode_num_draft_tokens", f"Number of draft tokens{source}", names, registry=registry
        )
        self.accepted = Counter(
            "vllm:spec_decode_num_accepted_tokens", f"Number of accepted draft tokens{source}", names, registry=registry
        )
        self._by_place = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of accepted draft tokens by position in the draft",
            [*labels, POSITION],
            registry=registry,
        )
        for kind in kinds or ("",):  # so that each series starts at 0
            self.count(0, 0, (0,), kind)

    def count(self, num_drafts: int, num_tokens: int, accepted: Sequence[int], kind: str = "") -> None:
        """Count verified drafts. `accepted[i]` of them had their token `i` accepted."""
        values = [*self._labels.values(), *((kind,) if kind else ())]
        self.drafts.labels(*values).inc(num_drafts)
        self.tokens.labels(*values).inc(num_tokens)
        self.accepted.labels(*values).inc(sum(accepted))
        for place, num_accepted in enumerate(accepted):
            self._by_place.labels(*self._labels.values(), str(place)).inc(num_accepted)
