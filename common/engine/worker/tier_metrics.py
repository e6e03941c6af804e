"""The metrics of the tiers below a worker's prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.engine.worker.engine import EngineStatus
from common.observe import Families

LABELS = ("tier",)


class TierCollector(Collector):
    """What the tiers hold and held, at each scrape; nothing of a worker without tiers."""

    def __init__(self, status: Callable[[], EngineStatus], labels: dict[str, str]) -> None:
        self._status, self._families = status, Families(labels)

    def collect(self) -> Iterator[Metric]:
        if not (tiers := self._status().tiers):
            return
        gauge, counter = self._families.gauge, self._families.counter
        states = [((t.name, "used"), t.num_blocks) for t in tiers]
        states += [((t.name, "free"), max(0, t.num_slots - t.num_blocks) * t.is_on) for t in tiers]
        yield gauge("diptych_kv_tier_blocks", "Places for KV blocks in tiers, by state", states, (*LABELS, "state"))
        is_on = [((t.name,), int(t.is_on)) for t in tiers]
        yield gauge("diptych_kv_tier_up", "Whether a tier works: 0 after its disk failed or was full", is_on, LABELS)
        yield from (
            counter(name, text, [((t.name,), getattr(t, field)) for t in tiers], LABELS)
            for name, text, field in (
                ("diptych_kv_tier_blocks_written", "KV blocks written to tiers", "num_written"),
                ("diptych_kv_tier_blocks_lost", "KV blocks that left memory before they were written", "num_lost"),
                ("diptych_kv_tier_blocks_corrupt", "KV blocks whose checksum failed in a tier", "num_corrupt"),
            )
        )
