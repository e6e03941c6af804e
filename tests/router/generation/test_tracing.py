"""Traces of requests, as a collector gets them."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import ConfigError, Unavailable
from router.dispatch.client import RequestTimeline
from router.generation.tracing import Phase, Tracing, phases
from router.observe.request_record import ChoiceRecord

from ...collector import Collector, attributes

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
INTERNAL, SERVER, ERROR = 1, 2, 2  # of OTLP's enumerations


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as collector:
        yield collector


async def gathered(running: Any, collector: Collector) -> Collector:
    """All spans so far are sent."""
    await asyncio.to_thread(running.app.state.router_state.tracing._provider.force_flush, 10_000)
    return collector


@pytest.mark.slow
async def test_a_request_and_its_phases(start: Any, collector: Collector) -> None:
    running = await start(otlp_traces_endpoint=collector.url)
    before = time.time_ns()
    reply = await running.http.post(
        "/v1/completions", json={"prompt": "hi", "max_tokens": 5, "temperature": 0.5}, headers={"traceparent": PARENT}
    )
    after = time.time_ns()
    await gathered(running, collector)
    (server,) = collector.named("text_completion tiny-random")
    assert (server.kind, server.trace_id.hex(), server.parent_span_id.hex()) == (SERVER, PARENT[3:35], PARENT[36:52])
    assert before <= server.start_time_unix_nano < server.end_time_unix_nano <= after
    found = attributes(server)
    assert found["diptych.request_id"] == reply.headers["x-request-id"]
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "tiny-random",
        "gen_ai.response.id": reply.json()["id"], "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 5, "http.response.status_code": 200, "url.path": "/v1/completions",
        "diptych.attempts": 1, "diptych.preemptions": 0,
    }  # fmt: skip
    assert expected.items() <= found.items() and "error.type" not in found
    children = [span for span in collector.spans if span.parent_span_id == server.span_id]
    assert {span.name for span in children} >= {"prefill", "decode"}
    for span in children:
        assert (span.kind, span.trace_id) == (INTERNAL, server.trace_id)
        assert server.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= server.end_time_unix_nano
    (prefill,) = collector.named("prefill")
    assert attributes(prefill) == {"diptych.choice": 0, "diptych.worker": "prefill-0"}
    assert collector.resource["service.name"] == "diptych-router"


async def test_the_workers_are_told_of_the_span(start: Any, collector: Collector) -> None:
    running = await start(otlp_traces_endpoint=collector.url)
    await running.http.post("/v1/completions", json={"prompt": "hi"}, headers={"traceparent": PARENT})
    await gathered(running, collector)
    (server,) = collector.named("text_completion tiny-random")
    assert running.engine.requests[0].traceparent == f"00-{PARENT[3:35]}-{server.span_id.hex()}-01"


async def test_without_tracing_they_are_told_of_the_clients(running: Any) -> None:
    await running.http.post("/v1/completions", json={"prompt": "hi"}, headers={"traceparent": PARENT})
    assert running.engine.requests[0].traceparent == PARENT


async def test_a_client_that_does_not_record_is_followed(start: Any, collector: Collector) -> None:
    running = await start(otlp_traces_endpoint=collector.url)
    for parent in (UNSAMPLED, PARENT):
        await running.http.post("/v1/completions", json={"prompt": "hi"}, headers={"traceparent": parent})
    await gathered(running, collector)
    assert len(collector.named("text_completion tiny-random")) == 1
    assert running.engine.requests[0].traceparent.endswith("-00")


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000])
async def test_without_a_parent_a_trace_begins_here(start: Any, collector: Collector, parent: str) -> None:
    running = await start(otlp_traces_endpoint=collector.url)
    reply = await running.http.post("/v1/completions", json={"prompt": "hi"}, headers={"traceparent": parent})
    assert reply.status_code == 200
    await gathered(running, collector)
    (server,) = collector.named("text_completion tiny-random")
    assert server.parent_span_id == b""


async def test_a_stream_and_several_choices(start: Any, collector: Collector) -> None:
    running = await start(otlp_traces_endpoint=collector.url)
    await running.events("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=4)
    await gathered(running, collector)
    (server,) = collector.named("chat tiny-random")
    assert attributes(server)["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert attributes(server)["diptych.time_to_first_token_s"] > 0
    assert sorted(attributes(span)["diptych.choice"] for span in collector.named("prefill")) == [0, 1, 2]


async def test_a_mistake_of_the_client_is_no_error_of_the_server(start: Any, collector: Collector) -> None:
    running = await start(otlp_traces_endpoint=collector.url)
    assert (await running.completion(prompt="hi", top_p=7)).status_code == 400
    await gathered(running, collector)
    (server,) = collector.named("text_completion")
    assert attributes(server)["http.response.status_code"] == 400
    assert attributes(server)["error.type"] == "InvalidField" and server.status.code != ERROR


async def test_a_refusal_at_the_door_has_its_span(start: Any, collector: Collector, tools: Any) -> None:
    running = await start(tools.Engine(full=Unavailable("full")), otlp_traces_endpoint=collector.url)
    assert (await running.completion(prompt="hi")).status_code == 503
    await gathered(running, collector)
    (server,) = collector.spans
    assert (attributes(server)["error.type"], server.status.code) == ("Unavailable", ERROR)


async def test_a_client_that_leaves(start: Any, collector: Collector, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=2), otlp_traces_endpoint=collector.url)
    async with running.http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as reply:
        async for _ in reply.aiter_lines():
            break
    while not collector.spans:
        await asyncio.sleep(0.02)
        await gathered(running, collector)
    (server,) = collector.named("text_completion tiny-random")
    assert attributes(server)["http.response.status_code"] == 499 and server.status.code == ERROR


@pytest.mark.slow
@pytest.mark.parametrize("status", [503, 400, None])
async def test_requests_do_not_mind_a_collector_that_is_away_or_ill(start: Any, status: int | None) -> None:
    with Collector(status=status or 200).running() as collector:
        url = collector.url if status else "http://127.0.0.1:9/v1/traces"
        running = await start(otlp_traces_endpoint=url)
        for _ in range(20):
            assert (await running.completion(prompt="hi")).status_code == 200


@pytest.mark.slow
async def test_a_collector_that_hangs_does_not_keep_the_router_from_ending(start: Any) -> None:
    with Collector(delay_s=60).running() as collector:
        running = await start(otlp_traces_endpoint=collector.url)
        await running.completion(prompt="hi")
        began = time.monotonic()
        running.app.state.router_state.tracing.close()
        assert collector.arrived.is_set() and time.monotonic() - began < 30


async def test_what_is_left_is_sent_at_the_end(
    start: Any, tools: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    running = await start(otlp_traces_endpoint=collector.url)
    await running.completion(prompt="hi")
    assert not collector.spans
    running.app.state.router_state.tracing.close()
    await tools.until(lambda: collector.named("text_completion tiny-random"))


async def test_the_librarys_variables_count(start: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    running = await start(otlp_traces_endpoint=collector.url)
    await running.completion(prompt="hi")
    await gathered(running, collector)
    assert collector.resource["service.name"] == "front"
    assert collector.resource["deployment.environment.name"] == "test"
    assert collector.headers[0]["x-key"] == "secret"


def test_a_router_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def missing(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(f"No module named {name!r}")
        return plain(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert Tracing.of(RouterConfig()) is None
    with pytest.raises(ConfigError, match=r"diptych\[tracing\]"):
        Tracing.of(RouterConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))


def told(first_at: float, last_at: float, **line: Any) -> ChoiceRecord:
    """A choice of which this is known."""
    return ChoiceRecord(0, first_at=first_at, last_at=last_at, timeline=RequestTimeline(**line), max_tokens=9)


def test_phases_lie_where_the_tokens_came() -> None:
    choice = told(
        12.0, 20.0, prefill_worker="p", decode_worker="d", queue_s=0.5, prefill_s=1.0, transfer_s=0.75, decode_s=7.5
    )  # fmt: skip
    assert list(phases(choice, 10.0)) == [
        Phase("queue", 10.5, 11.0), Phase("prefill", 11.0, 12.0, "p"), Phase("kv_transfer", 11.75, 12.5, "d"),
        Phase("decode", 12.5, 20.0, "d"),
    ]  # fmt: skip


def test_no_phase_begins_before_its_request() -> None:
    """Clocks of workers differ, and a phase may have been repeated."""
    choice = told(12.0, 13.0, decode_worker="d", queue_s=99.0, prefill_s=99.0, transfer_s=99.0, decode_s=99.0)
    assert {phase.began for phase in phases(choice, 10.0)} == {10.0}


def test_one_token_has_no_decode_phase_and_no_token_none() -> None:
    names = [phase.name for phase in phases(told(12.0, 12.0, prefill_worker="p", prefill_s=1.0), 10.0)]
    assert names == ["prefill"]
    assert list(phases(told(0.0, 0.0, prefill_worker="p"), 10.0)) == []


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector/", "http://", "http://a b/"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        RouterConfig(otlp_traces_endpoint=url)
