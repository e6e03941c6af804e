"""The router's metrics of the pools for autoscalers and operators; docs/metrics.md says what to do with each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.discovery.status import DiscoveryStatus
from router.dispatch.dispatcher import Dispatcher
from router.observe.slo import SLOWindow

Values = Iterable[tuple[tuple[str, ...], float]]


class PoolCollector(Collector):
    """Read from the dispatcher at scrape time."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        window: SLOWindow,
        labels: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher, self._window, self._labels, self._clock = dispatcher, window, labels, clock

    def collect(self) -> Iterable[Metric]:
        now = self._clock()
        fleet, window = self._dispatcher.fleet, self._window
        demand = self._dispatcher.demand(window.p95_token_s(now), window.tpot_s)
        unpaired = {("prefill",): len(fleet.pairing.prefill), ("decode",): len(fleet.pairing.decode)}
        attained = {(slo,): share for slo, share in window.attainment(now).items()}
        held = {(role,): num for role, num in demand.held.items()}
        backlog, pressure = {("prefill",): demand.backlog_s}, {("decode",): demand.pressure}
        gauge = self._gauge
        yield gauge("diptych_requests_held", "Sequences that find no worker of a role", ("role",), held.items())
        yield gauge("diptych_pool_backlog_seconds", "Seconds of prompts for one worker", ("role",), backlog.items())
        yield gauge("diptych_pool_pressure", "Load in workers that it would fill", ("role",), pressure.items())
        yield gauge("diptych_pool_workers", "Workers, by state", ("role", "state"), demand.workers.items())
        yield gauge("diptych_unpaired_workers", "Ready workers without a partner", ("role",), unpaired.items())
        if attained:
            yield gauge(
                "diptych_slo_attainment_ratio", "Share of the last minute that met a goal", ("slo",), attained.items()
            )
        if fleet.source is not None:
            yield from self._discovery(fleet.source.status, now)

    def _discovery(self, status: DiscoveryStatus, now: float) -> Iterator[Metric]:
        yield self._gauge(
            "diptych_discovery_endpoints", "Workers that discovery sees", ("role", "state"), status.counts().items()
        )
        yield self._gauge(
            "diptych_discovery_last_sync_age_seconds", "Since all was last looked up", (), [((), status.age_s(now))]
        )
        syncs = CounterMetricFamily("diptych_discovery_syncs", "Lookups of all", labels=[*self._labels, "result"])
        for result, count in status.num_syncs.items():
            syncs.add_metric([*self._labels.values(), result], count)
        yield syncs

    def _gauge(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, *labels])
        for key, value in values:
            family.add_metric([*self._labels.values(), *key], value)
        return family
