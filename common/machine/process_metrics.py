"""Process metrics from the operating system and the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.observe import Families


class _TaskCollector(Collector):
    """Counts the tasks of the event loop in which the scrape runs."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._families = Families(labels)

    def collect(self) -> Iterable[Metric]:
        yield self._families.gauge("diptych_asyncio_tasks", "Tasks of the event loop", _num_tasks())


def register_process(registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
    """Register the process's memory, files, CPU time and start time (`process_*`, Linux only) and task count."""
    ProcessCollector(registry=registry)
    registry.register(_TaskCollector(labels))


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no loop in this thread
        return 0
