"""The router's metrics of the pools for autoscalers and operators; docs/metrics.md says what to do with each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.observe import Families
from router.dispatch import Dispatcher
from router.fleet import DiscoveryStatus
from router.observe.slo import SLOWindow


class PoolCollector(Collector):
    """Reads the dispatcher at scrape time."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        window: SLOWindow,
        labels: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher, self._window, self._families, self._clock = dispatcher, window, Families(labels), clock

    def collect(self) -> Iterable[Metric]:
        now = self._clock()
        fleet, window = self._dispatcher.fleet, self._window
        demand = self._dispatcher.demand(window.tpot_s)
        unpaired = {("prefill",): len(fleet.pairing.prefill), ("decode",): len(fleet.pairing.decode)}
        attained = {(slo,): share for slo, share in window.attainment(now).items()}
        held = {(role,): num for role, num in demand.held.items()}
        backlog, pressure = {("prefill",): demand.backlog_s}, {("decode",): demand.pressure}
        gauge = self._families.gauge
        yield gauge("diptych_requests_held", "Sequences that find no worker of a role", held.items(), ("role",))
        yield gauge("diptych_pool_backlog_seconds", "Seconds of prompts for one worker", backlog.items(), ("role",))
        yield gauge("diptych_pool_pressure", "Load in workers that it would fill", pressure.items(), ("role",))
        yield gauge("diptych_pool_workers", "Workers, by state", demand.workers.items(), ("role", "state"))
        # For endpoint pickers, to which a router is the model server.
        yield gauge("vllm:num_requests_running", "Sequences in the workers' running batches", demand.num_running)
        yield gauge("vllm:num_requests_waiting", "Sequences waiting here or at workers", demand.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of decode workers' blocks in use, 0 to 1", demand.kv_usage)
        yield gauge("diptych_unpaired_workers", "Ready workers without a partner", unpaired.items(), ("role",))
        if attained:
            yield gauge(
                "diptych_slo_attainment_ratio", "Share of the last minute that met a goal", attained.items(), ("slo",)
            )
            by_class = window.class_attainment(now).items()
            yield gauge(
                "diptych_class_attainment_ratio",
                "The same, by class of requests",
                [((name, slo), share) for name, shares in by_class for slo, share in shares.items()],
                ("class", "slo"),
            )
        if fleet.source is not None:
            yield from discovery_families(fleet.source.status, self._families, now)


class DiscoveryCollector(Collector):
    """What discovery sees of the workers of all models together."""

    def __init__(
        self, status: DiscoveryStatus, labels: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._status, self._families, self._clock = status, Families(labels), clock

    def collect(self) -> Iterable[Metric]:
        return discovery_families(self._status, self._families, self._clock())


def discovery_families(status: DiscoveryStatus, families: Families, now: float) -> Iterator[Metric]:
    """What discovery sees, and how it fares."""
    gauge = families.gauge
    yield gauge(
        "diptych_discovery_endpoints", "Workers that discovery sees", status.counts().items(), ("role", "state")
    )
    yield gauge("diptych_discovery_last_sync_age_seconds", "Since all was last looked up", status.age_s(now))
    syncs = [((result,), count) for result, count in status.num_syncs.items()]
    yield families.counter("diptych_discovery_syncs", "Lookups of all", syncs, ("result",))
