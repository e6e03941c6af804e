"""Metrics of the router, with vLLM's names for quantities that vLLM has, otherwise with the prefix `diptych_`.

Times start when a request's head has arrived, so they include reading and tokenizing it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.config import RequestClass
from common.machine import register_process
from common.observe import SECONDS, SHORT_SECONDS, DraftMetrics, SharedText
from router.dispatch import DispatchLoad, RequestTimeline
from router.observe.collectors import LoadCollector
from router.observe.recent_traffic import RecentTraffic
from router.observe.request_record import ChoiceRecord, RequestRecord
from router.stored import StoreSize

ENGINE = "router"
STORE_FAILURES = "full, busy, slow, behind, damaged, too_large, closed, error"
PER_TOKEN_SECONDS = (0.0005, *SECONDS)
RATIOS = (0.25, 0.5, 0.67, 0.75, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.33, 1.5, 2.0, 4.0, 8.0)


class LoopHistogram(Collector):
    """Histogram without locks, for use from one event loop only. Exports the same samples as prometheus_client's."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)  # the last bucket is above all bounds
        self._sum, self._created = 0.0, time.time()

    def observe(self, seconds: float, count: int = 1) -> None:
        """Record `count` observations of the same value."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += count * seconds

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
        yield family


class MergedFamilies(Collector):
    """Merges collectors at scrape time. Labels, such as the model name, must distinguish their samples."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()


class _ReadFamilies(Collector):
    """Families that have been collected."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


class BatchMetrics:
    """Batch metrics of one router. Sizes are those of the store, which routers may share."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels
        self._lines = self._counter(
            "diptych_batch_lines",
            "Batch lines, by result: completed, failed, again (a retry)",
            "result",
        )
        self._failures = self._counter(
            "diptych_file_store_failures", f"Failures of the file store, by reason: {STORE_FAILURES}", "reason"
        )
        self._running = self._gauge("diptych_batches", "Batches that this router processes")
        self._asking = self._gauge("diptych_batch_lines_running", "Batch lines in progress")
        self._files = self._gauge("diptych_stored_files", "Files in the store")
        self._bytes = self._gauge("diptych_stored_file_bytes", "Bytes of the files in the store")

    def watch(self, size: Callable[[], StoreSize], running: Callable[[], tuple[int, int]]) -> None:
        """Set the callbacks for the store's size, and for the numbers of running batches and lines."""
        self._files.set_function(lambda: size().num_entries)
        self._bytes.set_function(lambda: size().num_bytes)
        self._running.set_function(lambda: running()[0])
        self._asking.set_function(lambda: running()[1])

    def count_line(self, result: str) -> None:
        """Count a result of a line: completed, failed or again (a retry)."""
        self._lines.labels(*self._labels.values(), result).inc()

    def count_failure(self, reason: str) -> None:
        """Count a failure of the file store. Thread-safe."""
        self._failures.labels(*self._labels.values(), reason).inc()

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [*self._labels, label], registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self._registry).labels(*self._labels.values())


class RouterMetrics:
    """Counters and histograms of the HTTP server. `text` serves `/metrics`, and `traffic` serves `/load`."""

    def __init__(
        self,
        model_name: str,
        load: Callable[[], DispatchLoad] | None,
        clock: Callable[[], float] = time.monotonic,
        front: RouterMetrics | None = None,
        classes: Mapping[str, RequestClass] | None = None,
    ) -> None:
        """Create the metrics of a model, or the front's, which have no `load`, no `classes` and no model name.

        With several models, each has its own metrics, and `front` shows them together.
        """
        self.traffic, self._clock, self._classes = RecentTraffic(), clock, classes or {}
        self._traffics = (self.traffic,) if front is None else (self.traffic, front.traffic)
        self.registry = CollectorRegistry()
        self._labelled_counters = CollectorRegistry()
        """The only metrics whose number of samples grows, with keys and paths. Unlike `registry`, it is thread-safe."""
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}  # cached because lookup is slow
        self._shown: Sequence[RouterMetrics] = (self,)
        self._text = SharedText(lambda: asyncio.to_thread(self.snapshot()))
        if load is not None:
            self.registry.register(LoadCollector(load, self._labels))
        if front is None:
            register_process(self.registry, self._labels)
        histogram = self._histogram
        self.ttft = histogram("vllm:time_to_first_token_seconds", "From the request's head to the first token")
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Time between consecutive tokens", PER_TOKEN_SECONDS
        )
        self.per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first", PER_TOKEN_SECONDS
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From the request's head to the last token")
        self.queue = histogram("vllm:request_queue_time_seconds", "Time in queues, of the router and of workers")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From admission to the first token")
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last")
        self.exposed_transfer = histogram(
            "diptych_exposed_transfer_seconds", "Delay of the second token by KV transfer", SHORT_SECONDS
        )
        self.ttft_ratio = histogram(
            "diptych_ttft_prediction_ratio", "Time to first token divided by its prediction", RATIOS
        )
        self.tpot_ratio = histogram(
            "diptych_tpot_prediction_ratio", "Mean time per later token divided by its prediction", RATIOS
        )
        self._drafts = DraftMetrics(self.registry, self._labels)
        self._add_counters()
        if front is None:
            self._add_front()

    def _add_counters(self) -> None:
        """Add counters of tokens, and of requests by result."""
        counter = self._counter
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token")
        self.cached_tokens = counter("diptych_cached_prompt_tokens", "Prompt tokens found in a prefix cache")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self._success = self._labelled(
            "vllm:request_success",
            "Ended sequences, by reason: stop, length, abort (by the client), error",
            "finished_reason",
        )
        self._requests = self._labelled(
            "diptych_http_requests",
            "HTTP requests to the API, by path and status; 499: the client disconnected",
            "path",
            "status",
        )
        self._errors = self._labelled(
            "diptych_http_errors", "Errors returned to clients, by status and type", "status", "type"
        )
        self._rejected = self._labelled(
            "diptych_http_rejected",
            "Connections and requests rejected before they reached the API, by reason: malformed, head (too large), "
            "slow_head, silent, pipelined, unread, unread_answer, connections (too many), evicted, handshake",
            "reason",
        )
        self._predictions = self._labelled(
            "diptych_goal_predictions",
            "Admitted sequences by class and goal (ttft, tpot): predicted at admission, and measured, as met or missed",
            *("class", "slo", "predicted", "measured"),
        )
        self._key_tokens = self._labelled(
            "diptych_key_tokens", "Tokens, by API key name and kind: prompt, output", "key", "kind"
        )
        self._fallbacks = self._labelled(
            "diptych_model_fallbacks", "Requests for the model served by another one, by that model", "to"
        )

    def _add_front(self) -> None:
        """Add metrics that belong to no model: connections, keys, stores."""
        self.connections = self._gauge("diptych_http_connections", "Open HTTP connections")
        self._add_access()
        self._add_store()
        self.batches = BatchMetrics(self.registry, self._labels)

    def _add_access(self) -> None:
        """Add the counters of `router.access`: keys and their limits, the audit log, reloaded files."""
        self._key_requests = self._labelled(
            "diptych_key_requests",
            "Requests to protected endpoints, by key name and status; the name is empty for an invalid key",
            "key",
            "status",
        )
        self._rate_limited = self._labelled(
            "diptych_rate_limited",
            "Requests rejected by a limit: requests, tokens, concurrency; of a key at a model with the prefix "
            "key_model_, of a model for all keys with the prefix model_",
            "key",
            "limit",
        )
        self._audit_dropped = self._counter("diptych_audit_dropped", "Lines dropped by the audit log")
        self._reloads = self._labelled(
            "diptych_reloads",
            "Reloads of files, by setting (api_key_file, tls_cert, models_file, lora_file) and result: ok, refused",
            "setting",
            "result",
        )

    def watch_certificate(self, left_s: Callable[[], float]) -> None:
        """Set the callback for the remaining time of the TLS certificate, in seconds."""
        text = "Seconds until the TLS certificate expires, negative afterwards"
        self._gauge("diptych_tls_certificate_expiry_seconds", text).set_function(left_s)

    def _add_store(self) -> None:
        """Add metrics of the response store."""
        self._store_failures = self._labelled(
            "diptych_response_store_failures", f"Failures of the response store, by reason: {STORE_FAILURES}", "reason"
        )
        self._stored = self._gauge("diptych_stored_responses", "Responses in the store")
        self._stored_bytes = self._gauge("diptych_stored_response_bytes", "Bytes of the responses in the store")
        self._background = self._gauge("diptych_background_responses", "Background responses in progress")

    def watch_store(self, look: Callable[[], tuple[StoreSize, int]]) -> None:
        """Set the callback for the store's size and the number of background responses."""
        self._stored.set_function(lambda: look()[0].num_entries)
        self._stored_bytes.set_function(lambda: look()[0].num_bytes)
        self._background.set_function(lambda: look()[1])

    def count_store_failure(self, reason: str) -> None:
        """Count a failure of the response store. Thread-safe."""
        self._add(self._store_failures, reason)

    async def text(self) -> bytes:
        """Return all metrics in Prometheus text format. A thread renders them."""
        return await self._text.get()

    def snapshot(self) -> Callable[[], bytes]:
        """Read the metrics that belong to the event loop.

        The returned function adds the labelled counters and returns the text. It may run in any thread.
        """
        read = [_ReadFamilies(one.registry.collect()) for one in self._shown]
        counters = [one._labelled_counters for one in self._shown]
        return lambda: generate_latest(MergedFamilies([*read, *counters]))

    def show_models(self, models: Sequence[RouterMetrics]) -> None:
        """Also render the metrics of `models`, with one family per name."""
        self._shown = (self, *models)

    def count_fallback(self, model: str) -> None:
        """Count a request that this `model` serves instead of another."""
        self._add(self._fallbacks, model)

    def count_request(self, path: str, status: int) -> None:
        """Count an HTTP request at its end. `path` must be a route, not client input."""
        self._add(self._requests, path, str(status))

    def count_error(self, status: int, kind: str) -> None:
        """Count an error sent to a client, or a disconnection (499)."""
        self._add(self._errors, str(status), kind)

    def count_rejected(self, reason: str) -> None:
        """Count a connection or request that was rejected before it reached the API."""
        self._add(self._rejected, reason)

    def count_key_request(self, key: str, status: int) -> None:
        """Count a request that requires a key. The key file limits the number of names."""
        self._add(self._key_requests, key, str(status))

    def count_rate_limited(self, key: str, limit: str) -> None:
        """Count a rejection by a key's limit."""
        self._add(self._rate_limited, key, limit)

    def count_audit_dropped(self, num: int) -> None:
        """Count lines dropped by the audit log. Thread-safe."""
        self._audit_dropped.inc(num)

    def count_reload(self, setting: str, *, ok: bool) -> None:
        """Count a reload of a setting's file, accepted or rejected."""
        self._add(self._reloads, setting, "ok" if ok else "refused")

    def observe_first(self, ttft_s: float, num_tokens: int) -> None:
        """Record the first tokens of an answer, `ttft_s` after its request's head."""
        self.ttft.observe(ttft_s)
        for traffic in self._traffics:
            traffic.first_tokens(ttft_s, num_tokens, self._clock())

    def observe_gap(self, gap_s: float, num_tokens: int) -> None:
        """Record `num_tokens` tokens, `gap_s` after the previous ones."""
        self.inter_token.observe(gap_s / num_tokens, num_tokens)
        for traffic in self._traffics:
            traffic.tokens(gap_s, num_tokens, self._clock())

    def observe_request(self, record: RequestRecord) -> None:
        """Record the end of a generation request."""
        self.count_request(record.path, record.status)
        for traffic in self._traffics:
            traffic.ended(record, self._clock())
        if record.error is not None:
            self.count_error(record.error.status, record.error.type)
        elif record.client_left:
            self.count_error(record.status, "client_closed")
        if record.is_answered:
            self._count_tokens(record)
        for choice in record.choices:
            reason = choice.finish_reason or ("abort" if record.client_left else "error")
            self._add(self._success, reason)
            if choice.finish_reason:
                self._observe_choice(choice, record)

    def _count_tokens(self, record: RequestRecord) -> None:
        num_prompt_tokens, num_output_tokens = record.num_prompt_tokens, record.num_output_tokens
        self.prompt_tokens.inc(num_prompt_tokens)
        self.cached_tokens.inc(record.num_cached_tokens)
        self.generation_tokens.inc(num_output_tokens)
        if record.key:
            self._add(self._key_tokens, record.key, "prompt", by=num_prompt_tokens)
            self._add(self._key_tokens, record.key, "output", by=num_output_tokens)

    def _observe_choice(self, choice: ChoiceRecord, record: RequestRecord) -> None:
        """Record a complete choice of a request."""
        decode_s, line = choice.last_at - choice.first_at, choice.timeline
        self.e2e.observe(choice.last_at - record.began)
        if choice.num_tokens > 1:
            self.per_output_token.observe(decode_s / (choice.num_tokens - 1))
        if line is not None:
            if line.drafts.num_drafts:
                self._drafts.count(line.drafts.num_drafts, line.drafts.num_tokens, line.drafts.accepted)
            self.queue.observe(line.queue_s)
            self.prefill.observe(line.prefill_s)
            self.decode.observe(line.decode_s or decode_s)
            if line.decode_s:  # 0 if the router stopped the choice early, before the decode worker's report
                self.exposed_transfer.observe(line.exposed_transfer_s)
            if line.forecast.is_known and line.num_attempts == 1:
                self._compare(line, choice, decode_s)
            if (one := self._classes.get(record.request_class)) is not None and line.num_attempts == 1:
                self._judge(one, line, choice, decode_s)

    def _judge(self, one: RequestClass, line: RequestTimeline, choice: ChoiceRecord, decode_s: float) -> None:
        """Count whether goals were met, and predicted to be met at admission."""
        token_s = decode_s / (choice.num_tokens - 1) if choice.num_tokens > 1 else 0.0
        for slo, goal_s, predicted_s, measured_s in (
            ("ttft", one.ttft_s, line.admitted.ttft_s, line.queue_s + line.prefill_s),
            ("tpot", one.tpot_s, line.admitted.tpot_s, token_s),
        ):
            if goal_s > 0 and predicted_s > 0 and measured_s > 0:
                results = ("met" if seconds <= goal_s else "missed" for seconds in (predicted_s, measured_s))
                self._add(self._predictions, one.name, slo, *results)

    def _compare(self, line: RequestTimeline, choice: ChoiceRecord, decode_s: float) -> None:
        """Compare the predicted times of a choice with the actual ones. Message transport counts as queueing."""
        if line.forecast.ttft_s > 0:
            self.ttft_ratio.observe((line.queue_s + line.prefill_s) / line.forecast.ttft_s)
        if line.forecast.token_s > 0 and choice.num_tokens > 1:
            self.tpot_ratio.observe(decode_s / (choice.num_tokens - 1) / line.forecast.token_s)

    def _add(self, counter: Counter, *labels: str, by: int = 1) -> None:
        child = self._children.get((counter, labels))
        if child is None:
            child = self._children[counter, labels] = counter.labels(*self._labels.values(), *labels)
        child.inc(by)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(*self._labels.values())

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(*self._labels.values())

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        """Create a counter with labels in addition to the common ones."""
        return Counter(name, text, [*self._labels, *labels], registry=self._labelled_counters)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> LoopHistogram:
        histogram = LoopHistogram(name, text, self._labels, buckets)
        self.registry.register(histogram)
        return histogram
