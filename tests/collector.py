"""A collector of OpenTelemetry's traces: a real HTTP server that keeps the spans it is sent."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE_S = 30.0


class Collector:
    """`spans` are OTLP's messages, `resource` the attributes of their sender, `headers` those of each request."""

    def __init__(self, delay_s: float = 0.0, status: int = 200) -> None:
        self.spans: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.resource: dict[str, Any] = {}
        self.arrived = threading.Event()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.arrived.set()
                time.sleep(delay_s)
                if status == 200:
                    collector.take(data, dict(self.headers))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def take(self, data: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(data)
        self.headers.append(headers)
        for resource in request.resource_spans:
            self.resource = attributes(resource.resource)
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    @contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield self
        self._server.shutdown()
        self._server.server_close()
        thread.join(PATIENCE_S)


def attributes(of: Any) -> dict[str, Any]:
    """A span's attributes, as Python's values."""
    return {entry.key: _value(entry.value) for entry in of.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


def seconds(span: Any) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
