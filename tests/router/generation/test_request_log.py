"""The counters and the log line of a request."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from common.errors import Unavailable


def line_of(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [record for record in caplog.records if record.getMessage() == "request"]
    return vars(record)


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router.generation.request_log")


@pytest.mark.parametrize("stream", [True, False])
async def test_the_life_of_an_answer(running: Any, tools: Any, caplog: Any, stream: bool) -> None:
    await running.completion(max_tokens=5, stream=stream)
    await tools.until(lambda: caplog.records)
    line = line_of(caplog)
    assert (line["status"], line["prompt"], line["output"], line["finish"]) == (200, 2, 5, "length")
    assert (line["prefill_worker"], line["decode_worker"], line["attempts"]) == ("prefill-0", "decode-0", 1)
    assert (line["queue_ms"], line["prefill_ms"], line["transfer_ms"]) == (1.0, 20.0, 3.0)
    assert 0 < line["ttft_ms"] <= line["total_ms"]


async def test_a_refusal(running: Any, caplog: Any) -> None:
    reply = await running.completion(n=0)
    line = line_of(caplog)
    assert (line["status"], line["error"]) == (400, "InvalidField")
    assert line["request_id"] == reply.headers["x-request-id"]


async def test_an_answer_that_broke(start: Any, tools: Any, caplog: Any) -> None:
    running = await start(tools.Engine(error=Unavailable("gone"), error_after=2))
    await running.completion(max_tokens=5, stream=True)
    await tools.until(lambda: caplog.records)
    assert (line_of(caplog)["status"], line_of(caplog)["reason"]) == (503, "gone")


async def test_counters(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=4, cached=1, per_event=2))
    await running.completion(prompt=["ab", "cd"], n=2, max_tokens=9)
    await running.chat(max_tokens=2, stream=True)
    await running.completion(n=0)
    await running.http.get("/nope")
    await tools.until(lambda: running.app.state.router_state.num_active == 0)
    label = '{engine="router",model_name="tiny-random"'
    values = {
        'vllm:request_success_total{engine="router",finished_reason="stop"': 4,
        'vllm:request_success_total{engine="router",finished_reason="length"': 1,
        f"vllm:generation_tokens_total{label}": 22,
        f"vllm:time_to_first_token_seconds_count{label}": 5,
        f"vllm:inter_token_latency_seconds_count{label}": 12,
        f"vllm:e2e_request_latency_seconds_count{label}": 5,
        f"diptych_cached_prompt_tokens_total{label}": 3,
        f'diptych_http_requests_total{label},path="/v1/completions",status="200"': 1,
        f'diptych_http_requests_total{label},path="/v1/completions",status="400"': 1,
        f'diptych_http_errors_total{label},status="404",type="invalid_request_error"': 1,
    }
    assert {line: await running.metric(line) for line in values} == values
