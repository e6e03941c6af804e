"""Faults of a batch: its input, its request, its lines, a busy service, the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from common.errors import InternalError, Overloaded
from router.dispatch.client import GenerationRequest, TokenEvent
from router.stored.errors import StoreFailed

from ...sdk import client_of
from .batching import COMPLETIONS, ended, line, lines_in, made


@pytest.fixture
def response_store() -> str:
    return "memory"


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        (["{"], [("invalid_json_line", 1, None)]),
        (["[]", "", "5"], [("invalid_json_line", 1, None), ("invalid_json_line", 3, None)]),
        ([], [("empty_file", None, None)]),
        ([line("a"), line("b"), line("a")], [("duplicate_custom_id", 3, "custom_id")]),
        ([{**line("a"), "custom_id": None}], [("missing_required_parameter", 1, "custom_id")]),
        ([line(5)], [("invalid_request", 1, "custom_id")]),
        ([{**line("a"), "method": "GET"}], [("invalid_method", 1, "method")]),
        ([line("a", "/v1/chat/completions")], [("url_mismatch", 1, "url")]),
        ([line("a", prompt="x", model="gpt-6")], [("model_not_found", 1, "body.model")]),
        ([line("a", prompt="x", stream=True)], [("invalid_request", 1, "body.stream")]),
        ([{**line("a"), "body": [1]}], [("invalid_request", 1, "body")]),
        ([line("a", prompt="x" * 9000), line("b")], [("invalid_request", 1, None)]),
        ([line(f"{i}") for i in range(4)], [("too_many_tasks", 4, None)]),
    ],
)
async def test_a_faulty_file(start: Any, lines: list[Any], faults: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.batches.run.MAX_LINES", 3)
    running = await start(max_body_bytes=1024)
    async with client_of(running) as sdk:
        failed = await ended(sdk, await made(sdk, lines or ["\n\n"]))
        assert failed.status == "failed" and failed.failed_at and not failed.output_file_id
        assert failed.errors is not None and failed.errors.object == "list" and failed.errors.data is not None
        assert [(one.code, one.line, one.param) for one in failed.errors.data] == faults
        assert all(one.message for one in failed.errors.data)
        assert (await sdk.files.list(purpose="batch_output")).data == []
    assert running.engine.requests == []


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata"),
        ({"metadata": {f"{i}": "v" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ],
)
async def test_a_wrong_request(sdk: openai.AsyncOpenAI, fields: Any, status: int, param: str) -> None:
    file = await sdk.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(openai.APIStatusError) as refused:
        await sdk.batches.create(**{**good, **fields})
    assert refused.value.status_code == status and refused.value.param == param
    assert (await sdk.batches.list()).data == []


@pytest.mark.slow
async def test_a_busy_service_is_asked_again(start: Any, tools: Any) -> None:
    class Busy(tools.Engine):  # type: ignore[misc, name-defined]
        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
            self.requests.append(request)
            if len(self.requests) <= 6:
                raise Overloaded("busy", retry_after_s=0.01)
            async for event in self._events(request):
                yield event

    running = await start(Busy())
    async with client_of(running) as sdk:
        done = await ended(sdk, await made(sdk, [line(f"{i}") for i in range(3)]))
    assert done.request_counts is not None and done.request_counts.completed == 3
    assert len(running.engine.requests) == 9
    assert (
        await running.metric('diptych_batch_lines_total{engine="router",model_name="tiny-random",result="again"') == 6
    )


async def test_what_always_fails_is_its_own_fault(start: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.batches.line_executor.FIRST_WAIT_S", 0.01)
    running = await start(tools.Engine(error=InternalError("it broke")))
    async with client_of(running) as sdk:
        done = await ended(sdk, await made(sdk, [line("a")]))
        (result,) = await lines_in(sdk, done.error_file_id)
    assert result["response"]["status_code"] == 500 and len(running.engine.requests) == 5


@pytest.mark.slow
async def test_a_full_store_ends_a_batch_with_what_it_has(start: Any) -> None:
    running = await start(file_store_mib=1)
    async with client_of(running) as sdk:
        lines = [line(f"{i}", prompt="x", max_tokens=900, logprobs=5) for i in range(60)]
        failed = await ended(sdk, await made(sdk, lines))
        assert failed.status == "failed" and failed.errors is not None and failed.errors.data is not None
        assert failed.errors.data[0].code == "file_storage_full" and failed.request_counts is not None
        assert 0 < len(await lines_in(sdk, failed.output_file_id)) == failed.request_counts.completed < 60


async def test_a_store_that_fails_for_a_while_loses_nothing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.batches.run.STORE_RETRY_S", 0.01)
    running = await start()
    batches, failures = running.app.state.batches.store.batches, [StoreFailed("full", "disk full")] * 5
    add = batches.add

    async def failing(*args: Any) -> bool:
        if failures:
            raise failures.pop()
        return await add(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(batches, "add", failing)
    async with client_of(running) as sdk:
        done = await ended(sdk, await made(sdk, [line(f"{i}") for i in range(9)]))
        assert done.status == "completed" and len(await lines_in(sdk, done.output_file_id)) == 9
    assert len(running.engine.requests) == 9 and not failures


async def test_an_answer_that_is_too_large_is_an_error(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.batches.line_executor.MAX_ANSWER_BYTES", 100)
    async with client_of(await start()) as sdk:
        done = await ended(sdk, await made(sdk, [line("a")]))
        (result,) = await lines_in(sdk, done.error_file_id)
    assert result["response"] is None and result["error"]["code"] == "answer_too_large"
