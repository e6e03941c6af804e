"""The router's metrics, under vLLM's names where vLLM has the quantity, else under `diptych_`.

Times begin when the request's head has arrived, so they include reading and tokenising it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.machine.process_metrics import register_process
from common.worker.metrics import SECONDS, SHORT_SECONDS
from router.dispatch.load import DispatchLoad
from router.observe.request_record import ChoiceRecord, RequestRecord

ENGINE = "router"
PER_TOKEN_SECONDS = (0.0005, *SECONDS)


class _LoadCollector(Collector):
    """Reads the dispatcher's load at scrape time."""

    def __init__(self, load: Callable[[], DispatchLoad], labels: Mapping[str, str]) -> None:
        self._load, self._labels = load, labels

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        yield self._gauge("diptych_requests_in_flight", "Sequences in the router, by stage", "stage", load.stages)
        limit = {"": load.wait_limit_s}
        yield self._gauge("diptych_wait_limit_seconds", "How long a new request may be bound to wait", "", limit)
        yield self._counter("diptych_retries", "Moves to another worker, by role", "role", load.num_retries)
        takeovers = load.num_retries.get("decode", 0)
        yield self._counter("diptych_takeovers", "Answers that another decode worker went on with", "", {"": takeovers})
        yield self._counter("diptych_failures", "Sequences given up, by error class", "reason", load.num_failures)
        yield self._counter("diptych_placements", "Sequences placed, by kind of place", "kind", load.num_choices)
        yield self._counter(
            "diptych_handovers", "Running answers handed over between workers", "outcome", load.num_handovers
        )
        stale = {"": load.num_stale_deltas}
        yield self._counter("diptych_stale_deltas", "Tokens that came from a worker given up", "", stale)
        yield from self._workers(load)

    def _workers(self, load: DispatchLoad) -> Iterator[Metric]:
        names = [*self._labels, "worker", "role"]
        state = GaugeMetricFamily("diptych_worker_state", "1 for the state a worker is in", labels=[*names, "state"])
        booked = GaugeMetricFamily("diptych_worker_requests", "Sequences this router has on a worker", labels=names)
        queued = GaugeMetricFamily("diptych_worker_queued_tokens", "Prompt tokens waiting on a worker", labels=names)
        blocks = GaugeMetricFamily("diptych_worker_available_blocks", "KV blocks a worker could give", labels=names)
        cuts = CounterMetricFamily("diptych_worker_cuts", "Times the connection to a worker was lost", labels=names)
        unsent = CounterMetricFamily("diptych_worker_unsent", "Messages a full queue had no room for", labels=names)
        dropped = CounterMetricFamily(
            "diptych_worker_frames_dropped", "Frames that were no valid message", labels=names
        )
        for worker in load.workers:
            values = [*self._labels.values(), worker.worker_id or worker.address, worker.role]
            state.add_metric([*values, worker.state], 1)
            booked.add_metric(values, worker.num_booked_requests)
            queued.add_metric(values, worker.num_queued_tokens)
            blocks.add_metric(values, worker.num_available_blocks)
            cuts.add_metric(values, worker.num_cuts)
            unsent.add_metric(values, worker.num_unsent)
            dropped.add_metric(values, worker.num_dropped_frames)
        yield from (state, booked, queued, blocks, cuts, unsent, dropped)

    def _gauge(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return family

    def _counter(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return family


class RouterMetrics:
    """Counters and histograms that the HTTP front writes; `render` is what `/metrics` shows."""

    def __init__(self, model_name: str, load: Callable[[], DispatchLoad]) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self.registry.register(_LoadCollector(load, self._labels))
        register_process(self.registry, self._labels)
        histogram, counter = self._histogram, self._counter
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
        self.connections = Gauge(
            "diptych_http_connections", "Open HTTP connections", list(self._labels), registry=self.registry
        ).labels(*self._labels.values())
        self._add_access()

    def _add_access(self) -> None:
        """The counters of `router.auth`: keys and their limits, the audit log, files that are read again."""
        self._key_requests = self._labelled(
            "diptych_key_requests",
            "Requests that want a key, by its name and status; the name is empty for a wrong key",
            "key",
            "status",
        )
        self._key_tokens = self._labelled(
            "diptych_key_tokens", "Tokens by the name of the key that used them, prompt or output", "key", "kind"
        )
        self._rate_limited = self._labelled(
            "diptych_rate_limited",
            "Requests refused because a key had used up a limit: requests, tokens or concurrency",
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

    def render(self) -> bytes:
        """Prometheus text of everything."""
        return generate_latest(self.registry)

    def count_request(self, path: str, status: int) -> None:
        """An HTTP request has ended. `path` is a route, never a client's text."""
        self._requests.labels(*self._labels.values(), path, str(status)).inc()

    def count_error(self, status: int, kind: str) -> None:
        """A client got an error, or (499) went away."""
        self._errors.labels(*self._labels.values(), str(status), kind).inc()

    def count_rejected(self, reason: str) -> None:
        """A connection or request was turned away before it reached the API."""
        self._rejected.labels(*self._labels.values(), reason).inc()

    def count_key_request(self, key: str, status: int) -> None:
        """A request that needs a key has ended; the key file bounds the names."""
        self._key_requests.labels(*self._labels.values(), key, str(status)).inc()

    def count_rate_limited(self, key: str, limit: str) -> None:
        """A key has used up a limit."""
        self._rate_limited.labels(*self._labels.values(), key, limit).inc()

    def count_audit_dropped(self, num: int) -> None:
        """The audit log lost lines. Its thread may call this."""
        self._audit_dropped.inc(num)

    def count_reload(self, setting: str, *, ok: bool) -> None:
        """The file of a setting was read again, and taken or refused."""
        self._reloads.labels(*self._labels.values(), setting, "ok" if ok else "refused").inc()

    def observe_gap(self, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` came `gap_s` after the tokens before them."""
        for _ in range(num_tokens):
            self.inter_token.observe(gap_s / num_tokens)

    def observe_request(self, record: RequestRecord) -> None:
        """A generation request has ended."""
        self.count_request(record.path, record.status)
        if record.error is not None:
            self.count_error(record.error.status, record.error.type)
        elif record.client_left:
            self.count_error(record.status, "client_closed")
        if record.num_output_tokens:
            self._count_tokens(record)
        for choice in record.choices:
            reason = choice.finish_reason or ("abort" if record.client_left else "error")
            self._success.labels(*self._labels.values(), reason).inc()
            if choice.finish_reason:
                self._observe_choice(choice, record.began)

    def _count_tokens(self, record: RequestRecord) -> None:
        num_prompt_tokens, num_output_tokens = record.num_prompt_tokens, record.num_output_tokens
        self.prompt_tokens.inc(num_prompt_tokens)
        self.cached_tokens.inc(record.num_cached_tokens)
        self.generation_tokens.inc(num_output_tokens)
        if record.key:
            self._key_tokens.labels(*self._labels.values(), record.key, "prompt").inc(num_prompt_tokens)
            self._key_tokens.labels(*self._labels.values(), record.key, "output").inc(num_output_tokens)

    def _observe_choice(self, choice: ChoiceRecord, began: float) -> None:
        """A complete choice of a request that came at `began`."""
        decode_s, line = choice.last_at - choice.first_at, choice.timeline
        self.e2e.observe(choice.last_at - began)
        if choice.num_tokens > 1:
            self.per_output_token.observe(decode_s / (choice.num_tokens - 1))
        if line is not None:
            self.queue.observe(line.queue_s)
            self.prefill.observe(line.prefill_s)
            self.decode.observe(line.decode_s or decode_s)
            if line.decode_s:  # else the router stopped early, and the decode worker's own report never came
                self.exposed_transfer.observe(line.exposed_transfer_s)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(*self._labels.values())

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        """A counter with more labels than the common ones."""
        return Counter(name, text, [*self._labels, *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, text, list(self._labels), buckets=buckets, registry=self.registry).labels(
            *self._labels.values()
        )
