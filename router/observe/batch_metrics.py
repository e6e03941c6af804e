"""The metrics of files and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.stored import StoreSize


class BatchMetrics:
    """Of one router; sizes are those of a store that it may share."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels
        self._lines = self._counter(
            "diptych_batch_lines",
            "Lines of batches that got a result, or were asked again, by how they ended",
            "result",
        )
        self._failures = self._counter(
            "diptych_file_store_failures", "Times that the store of files failed, by reason", "reason"
        )
        self._running = self._gauge("diptych_batches", "Batches that this router works on")
        self._asking = self._gauge("diptych_batch_lines_running", "Lines of batches that are being answered now")
        self._files = self._gauge("diptych_stored_files", "Files in the store")
        self._bytes = self._gauge("diptych_stored_file_bytes", "Bytes of the files in the store")

    def watch(self, size: Callable[[], StoreSize], running: Callable[[], tuple[int, int]]) -> None:
        """Ask `size` for the store's, and `running` for the numbers of batches and of lines."""
        self._files.set_function(lambda: size().num_entries)
        self._bytes.set_function(lambda: size().num_bytes)
        self._running.set_function(lambda: running()[0])
        self._asking.set_function(lambda: running()[1])

    def count_line(self, result: str) -> None:
        """A line ended, or is asked again: completed, failed, again."""
        self._lines.labels(*self._labels.values(), result).inc()

    def count_failure(self, reason: str) -> None:
        """The store of files failed. Its thread may call this."""
        self._failures.labels(*self._labels.values(), reason).inc()

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [*self._labels, label], registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self._registry).labels(*self._labels.values())
