"""OpenTelemetry traces: one span per request, with child spans for its phases.

    chat smollm2-135m     server span; child of the client's span if the request has a `traceparent`
      ├ queue             ends when a worker begins with the prompt
      ├ prefill           ends with the first token
      ├ kv_transfer       ends when the decode worker has the prompt's KV
      └ decode            ends with the last token

Workers measure the durations of phases (`RequestTimeline`). The router derives their times from the arrival of the
first and the last token. Names and attributes follow OpenTelemetry's conventions for generative AI, plus `diptych.*`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from common import __version__
from common.config import RouterConfig
from common.errors import ConfigError
from common.packages import install_command
from router.observe import ChoiceRecord, RequestRecord

if TYPE_CHECKING:  # the library is an extra, which only tracing needs
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

EXPORT_TIMEOUT_S = 5.0
"""Timeout for exporting one batch of spans to the collector."""
FLUSH_S = 1.0
"""Maximum time that shutdown waits for the last spans to be exported."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
}
Value = str | int | float | tuple[str, ...]


class Phase(NamedTuple):
    """A phase of a request, in perf_counter seconds, and its worker."""

    name: str
    began: float
    ended: float
    worker: str = ""


class Tracing:
    """Creates spans. The library's thread exports them from a bounded queue, and drops spans when it is full."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("diptych.router", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def of(cls, config: RouterConfig) -> Tracing | None:
        """Create tracing as configured, or None. Raises ConfigError if the library is not installed."""
        if not config.otlp_traces_endpoint:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            allowed = f"empty, or install OpenTelemetry with {install_command('tracing')} ({error})"
            raise ConfigError("otlp_traces_endpoint", config.otlp_traces_endpoint, allowed) from error
        ours = Resource({"service.name": "diptych-router", "service.version": __version__})
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override ours.
        resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(config.otlp_traces_endpoint, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(self, path: str, headers: Mapping[str, str], began: float) -> RequestTrace:
        """Start the span of a generation request that arrived at `began` (perf_counter seconds)."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        operation = OPERATIONS.get(path, path)
        parent = self._propagator.extract({k: headers[k] for k in ("traceparent", "tracestate") if k in headers})
        offset_ns = time.time_ns() - time.perf_counter_ns()
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "diptych", "url.path": path}
        span = self._tracer.start_span(
            operation, parent, SpanKind.SERVER, attributes, start_time=offset_ns + round(began * 1e9)
        )
        context, carrier = set_span_in_context(span), dict[str, str]()
        self._propagator.inject(carrier, context)
        return RequestTrace(self._tracer, span, context, operation, offset_ns, carrier.get("traceparent", ""))

    def close(self) -> None:
        """Export the last spans, for at most `FLUSH_S`, and stop the library's thread."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(FLUSH_S)


@dataclass(frozen=True)
class RequestTrace:
    """The span of one request, completed by `end`.

    `traceparent` identifies the span to workers (W3C format). perf_counter time plus `offset_ns` is wall-clock time.
    """

    tracer: Tracer
    span: Span
    context: Context
    operation: str
    offset_ns: int
    traceparent: str

    def end(self, record: RequestRecord) -> None:
        """Complete the span and add a child span per phase."""
        if self.span.is_recording():
            self.span.update_name(f"{self.operation} {record.model}" if record.model else self.operation)
            self.span.set_attributes(dict(_attributes(record)))
            if record.status >= 400:
                self._fail(record)
            for choice in record.choices:
                for phase in phases(choice, record.began):
                    self._add(phase, choice.index)
        self.span.end(self._at(record.ended))

    def _fail(self, record: RequestRecord) -> None:
        from opentelemetry.trace import Status, StatusCode

        self.span.set_attribute("error.type", record.error_name or str(record.status))
        if record.status >= 500 or record.client_left:  # client errors do not mark a server span as failed
            self.span.set_status(Status(StatusCode.ERROR, str(record.error or "client left")))

    def _add(self, phase: Phase, choice: int) -> None:
        attributes: dict[str, Value] = {"diptych.choice": choice}
        if phase.worker:
            attributes["diptych.worker"] = phase.worker
        span = self.tracer.start_span(phase.name, self.context, attributes=attributes, start_time=self._at(phase.began))
        span.end(self._at(phase.ended))

    def _at(self, seconds: float) -> int:
        return self.offset_ns + round(seconds * 1e9)


def phases(choice: ChoiceRecord, began: float) -> Iterator[Phase]:
    """Yield the known phases of a choice; none begins before its request."""
    line = choice.timeline
    if line is None or not choice.first_at:
        return
    start = max(began, choice.first_at - line.prefill_s)
    if line.queue_s:
        yield Phase("queue", max(began, start - line.queue_s), start)
    prefill_worker = line.prefill_worker or line.decode_worker
    yield Phase("prefill", start, choice.first_at, prefill_worker)
    if not line.decode_worker or choice.last_at <= choice.first_at:
        return
    decode_began = max(start, choice.last_at - line.decode_s if line.decode_s else choice.first_at)
    if line.transfer_s:
        yield Phase("kv_transfer", max(start, decode_began - line.transfer_s), decode_began, line.decode_worker)
    yield Phase("decode", decode_began, choice.last_at, line.decode_worker)


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Value]]:
    yield "diptych.request_id", record.request_id
    yield "http.response.status_code", record.status
    if record.model:
        yield "gen_ai.request.model", record.model
    yield "diptych.request_class", record.request_class
    if not record.choices:
        return
    first = record.choices[0]
    yield "gen_ai.response.id", record.id
    yield "gen_ai.request.max_tokens", first.max_tokens
    yield "gen_ai.request.temperature", first.temperature
    yield "gen_ai.request.top_p", first.top_p
    yield "gen_ai.request.choice.count", len(record.choices)
    yield "gen_ai.response.finish_reasons", tuple(choice.finish_reason or "error" for choice in record.choices)
    yield "gen_ai.usage.input_tokens", record.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", record.num_output_tokens
    yield "diptych.cached_tokens", record.num_cached_tokens
    lines = [choice.timeline for choice in record.choices if choice.timeline is not None]
    yield "diptych.attempts", max((line.num_attempts for line in lines), default=0)
    yield "diptych.preemptions", sum(line.num_preemptions for line in lines)
    if record.ttft_s is not None:
        yield "diptych.time_to_first_token_s", record.ttft_s
