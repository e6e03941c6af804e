"""The metrics of a worker's adapters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.engine.worker.adapters import WorkerAdapters
from common.engine.worker.engine import EngineStatus
from common.observe import Families

LABELS = ("lora_name",)


class AdapterCollector(Collector):
    """What adapters take and who uses them, at each scrape; nothing of a worker without places for any."""

    def __init__(
        self,
        adapters: WorkerAdapters,
        status: Callable[[], EngineStatus],
        labels: dict[str, str],
        max_loras: int,
    ) -> None:
        self._adapters, self._status, self._max_loras = adapters, status, max_loras
        self._families = Families(labels)

    def collect(self) -> Iterator[Metric]:
        if not self._max_loras:
            return
        gauge, names, status = self._families.gauge, self._adapters.names, self._status()
        running = {names.get(digest, digest): num for digest, num in status.adapters_running.items()}
        waiting = {names.get(digest, digest): num for digest, num in status.adapters_waiting.items()}
        used = [(("used",), status.num_adapters), (("free",), self._max_loras - status.num_adapters)]
        yield gauge("diptych_lora_places", "Places for adapters, by state", used, ("state",))
        loaded = [state for state in self._adapters.states if state.status == "loaded"]
        sizes = [((state.name,), state.num_bytes) for state in loaded]
        yield gauge("diptych_lora_bytes", "Memory that an adapter takes", sizes, LABELS)
        requests = [((name, "running"), num) for name, num in running.items()]
        requests += [((name, "waiting"), num) for name, num in waiting.items()]
        yield gauge("diptych_lora_requests", "Requests here by adapter and state", requests, (*LABELS, "state"))
        shown = (str(self._max_loras), ",".join(sorted(running)), ",".join(sorted(waiting)))
        yield gauge(
            "vllm:lora_requests_info",
            "Adapters whose requests run and wait, as labels; the value is the time",
            [(shown, time.time())],
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
