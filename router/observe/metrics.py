"""The router's metrics, under vLLM's names where vLLM has the quantity, else under `diptych_`.

Times begin when the request's head has arrived, so they include reading and tokenising it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.machine import register_process
from common.observe import SECONDS, SHORT_SECONDS, DraftMetrics
from router.dispatch import DispatchLoad, RequestTimeline
from router.observe.collectors import LoadCollector
from router.observe.recent_traffic import RecentTraffic
from router.observe.request_record import ChoiceRecord, RequestRecord
from router.stored import StoreSize

ENGINE = "router"
PER_TOKEN_SECONDS = (0.0005, *SECONDS)
RATIOS = (0.25, 0.5, 0.67, 0.75, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.33, 1.5, 2.0, 4.0, 8.0)


class LoopHistogram(Collector):
    """Owned by the event loop, which also reads it: the same samples as `prometheus_client.Histogram` has."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)  # the last: above all bounds
        self._sum, self._created = 0.0, time.time()

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` observations of the same value."""
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
    """Reads all collectors at scrape time. They tell their samples apart by labels, such as the model's name."""

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


class RouterMetrics:
    """Counters and histograms that the HTTP front writes; `render` is for `/metrics`, `traffic` for `/load`."""

    def __init__(
        self,
        model_name: str,
        load: Callable[[], DispatchLoad] | None,
        clock: Callable[[], float] = time.monotonic,
        front: RouterMetrics | None = None,
    ) -> None:
        """Of several models each has metrics of its own, which the `front` shows; it has no `load`, and no name."""
        self.traffic, self._clock = RecentTraffic(), clock
        self._traffics = (self.traffic,) if front is None else (self.traffic, front.traffic)
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}  # to look them up takes long
        self._shown: Collector = self.registry
        if load is not None:
            self.registry.register(LoadCollector(load, self._labels))
        if front is None:
            register_process(self.registry, self._labels)
        histogram = self._histogram
        self.ttft = histogram("vllm:time_to_first_token_seconds", "From the request's head to its first token")
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Between one token and the next", PER_TOKEN_SECONDS
        )
        self.per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a token after the first", PER_TOKEN_SECONDS
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From the request's head to its last token")
        self.queue = histogram("vllm:request_queue_time_seconds", "Waiting, in the router and on workers")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From admission to the first token")
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last")
        self.exposed_transfer = histogram(
            "diptych_exposed_transfer_seconds", "KV transfer that delayed the second token", SHORT_SECONDS
        )
        self.ttft_ratio = histogram(
            "diptych_ttft_prediction_ratio", "Time to the first token, over what was predicted for it", RATIOS
        )
        self.tpot_ratio = histogram(
            "diptych_tpot_prediction_ratio", "Mean time of a later token, over what was predicted for it", RATIOS
        )
        self._drafts = DraftMetrics(self.registry, self._labels)
        self._add_counters()
        if front is None:
            self._add_front()

    def _add_counters(self) -> None:
        """Tokens, and requests by how they ended."""
        counter = self._counter
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token")
        self.cached_tokens = counter("diptych_cached_prompt_tokens", "Those of them that a prefix cache held")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self._success = self._labelled("vllm:request_success", "Sequences that ended, by reason", "finished_reason")
        self._requests = self._labelled(
            "diptych_http_requests",
            "HTTP requests to the API, by path and status; 499 is a client that went away",
            "path",
            "status",
        )
        self._errors = self._labelled(
            "diptych_http_errors", "Errors that clients were told, by status and type", "status", "type"
        )
        self._rejected = self._labelled(
            "diptych_http_rejected",
            "Connections and requests that were turned away before the API saw them, by reason",
            "reason",
        )
        self._key_tokens = self._labelled(
            "diptych_key_tokens", "Tokens by the name of the key that used them, prompt or output", "key", "kind"
        )
        self._fallbacks = self._labelled(
            "diptych_model_fallbacks", "Requests for the model that another one answered, by its name", "to"
        )

    def _add_front(self) -> None:
        """What belongs to no model: connections, keys, the store."""
        self.connections = self._gauge("diptych_http_connections", "Open HTTP connections")
        self._add_access()
        self._add_store()
        self.batches = BatchMetrics(self.registry, self._labels)

    def _add_access(self) -> None:
        """The counters of `router.access`: keys and their limits, the audit log, files that are read again."""
        self._key_requests = self._labelled(
            "diptych_key_requests",
            "Requests that want a key, by its name and status; the name is empty for a wrong key",
            "key",
            "status",
        )
        self._rate_limited = self._labelled(
            "diptych_rate_limited",
            "Requests refused because a key, or a model, had used up a limit: requests, tokens or concurrency",
            "key",
            "limit",
        )
        self._audit_dropped = self._counter("diptych_audit_dropped", "Lines that the audit log lost")
        self._reloads = self._labelled(
            "diptych_reloads",
            "Times that a file was read anew, by setting and whether it was taken",
            "setting",
            "result",
        )

    def _add_store(self) -> None:
        """Metrics of the store of the Responses API."""
        self._store_failures = self._labelled(
            "diptych_response_store_failures", "Times that the store of responses failed, by reason", "reason"
        )
        self._stored = self._gauge("diptych_stored_responses", "Responses in the store")
        self._stored_bytes = self._gauge("diptych_stored_response_bytes", "Bytes of the responses in the store")
        self._background = self._gauge("diptych_background_responses", "Responses that are made in the background now")

    def watch_store(self, look: Callable[[], tuple[StoreSize, int]]) -> None:
        """Ask `look` for the size of the store, and for the number of answers in the background."""
        self._stored.set_function(lambda: look()[0].num_entries)
        self._stored_bytes.set_function(lambda: look()[0].num_bytes)
        self._background.set_function(lambda: look()[1])

    def count_store_failure(self, reason: str) -> None:
        """The store of responses failed. Its thread may call this."""
        self._add(self._store_failures, reason)

    def render(self) -> bytes:
        """Prometheus text of everything."""
        return generate_latest(self._shown)

    def show_models(self, models: Sequence[RouterMetrics]) -> None:
        """Render those of `models` as well, each family once."""
        self._shown = MergedFamilies([self.registry, *(one.registry for one in models)])

    def count_fallback(self, model: str) -> None:
        """This `model` answers a request in place of another."""
        self._add(self._fallbacks, model)

    def count_request(self, path: str, status: int) -> None:
        """An HTTP request has ended. `path` is a route, never a client's text."""
        self._add(self._requests, path, str(status))

    def count_error(self, status: int, kind: str) -> None:
        """A client got an error, or (499) went away."""
        self._add(self._errors, str(status), kind)

    def count_rejected(self, reason: str) -> None:
        """A connection or request was turned away before it reached the API."""
        self._add(self._rejected, reason)

    def count_key_request(self, key: str, status: int) -> None:
        """A request that needs a key has ended; the key file bounds the names."""
        self._add(self._key_requests, key, str(status))

    def count_rate_limited(self, key: str, limit: str) -> None:
        """A key has used up a limit."""
        self._add(self._rate_limited, key, limit)

    def count_audit_dropped(self, num: int) -> None:
        """The audit log lost lines. Its thread may call this."""
        self._audit_dropped.inc(num)

    def count_reload(self, setting: str, *, ok: bool) -> None:
        """The file of a setting was read again, and taken or refused."""
        self._add(self._reloads, setting, "ok" if ok else "refused")

    def observe_first(self, ttft_s: float, num_tokens: int) -> None:
        """The first tokens of an answer came `ttft_s` after its request's head."""
        self.ttft.observe(ttft_s)
        for traffic in self._traffics:
            traffic.first_tokens(ttft_s, num_tokens, self._clock())

    def observe_gap(self, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` came `gap_s` after the tokens before them."""
        self.inter_token.observe(gap_s / num_tokens, num_tokens)
        for traffic in self._traffics:
            traffic.tokens(gap_s, num_tokens, self._clock())

    def observe_request(self, record: RequestRecord) -> None:
        """A generation request has ended."""
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
                self._observe_choice(choice, record.began)

    def _count_tokens(self, record: RequestRecord) -> None:
        num_prompt_tokens, num_output_tokens = record.num_prompt_tokens, record.num_output_tokens
        self.prompt_tokens.inc(num_prompt_tokens)
        self.cached_tokens.inc(record.num_cached_tokens)
        self.generation_tokens.inc(num_output_tokens)
        if record.key:
            self._add(self._key_tokens, record.key, "prompt", by=num_prompt_tokens)
            self._add(self._key_tokens, record.key, "output", by=num_output_tokens)

    def _observe_choice(self, choice: ChoiceRecord, began: float) -> None:
        """A complete choice of a request that came at `began`."""
        decode_s, line = choice.last_at - choice.first_at, choice.timeline
        self.e2e.observe(choice.last_at - began)
        if choice.num_tokens > 1:
            self.per_output_token.observe(decode_s / (choice.num_tokens - 1))
        if line is not None:
            if line.drafts.num_drafts:
                self._drafts.count(line.drafts.num_drafts, line.drafts.num_tokens, line.drafts.accepted)
            self.queue.observe(line.queue_s)
            self.prefill.observe(line.prefill_s)
            self.decode.observe(line.decode_s or decode_s)
            if line.decode_s:  # else the router stopped early, and the decode worker's own report never came
                self.exposed_transfer.observe(line.exposed_transfer_s)
            if line.forecast.is_known and line.num_attempts == 1:
                self._compare(line, choice, decode_s)

    def _compare(self, line: RequestTimeline, choice: ChoiceRecord, decode_s: float) -> None:
        """Compare the prediction for a choice with its times. Messages between processes count as waiting."""
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
        """A counter with more labels than the common ones."""
        return Counter(name, text, [*self._labels, *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> LoopHistogram:
        histogram = LoopHistogram(name, text, self._labels, buckets)
        self.registry.register(histogram)
        return histogram
