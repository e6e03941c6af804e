"""Batches: made, watched, cancelled and read by the official client; faults of their input; keys, time, room."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from common.machine.wall_clock import WallClock
from router.access.keys import digest_of
from router.api.batches import service
from router.dispatch.client import GenerationRequest, TokenEvent
from router.stored.database import LEASE_S
from router.stored.files import FileStore
from router.stored.records import IN_PROGRESS, BatchChanges, StoredBatch

from ...sdk import client_of
from .batching import COMPLETIONS, ended, line, lines_in, made

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
def response_store() -> str:
    return "memory"


async def test_every_line_is_answered(sdk: openai.AsyncOpenAI, running: Any) -> None:
    batch = await made(sdk, [line(f"r{i}") for i in range(40)], metadata={"a": "b"})
    assert batch.status == "validating" and batch.id.startswith("batch_") and batch.metadata == {"a": "b"}
    done = await ended(sdk, batch)
    assert done.status == "completed" and done.error_file_id is None and done.errors is None
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert done.model == "tiny-random" and done.endpoint == COMPLETIONS and done.object == "batch"
    assert done.in_progress_at and done.finalizing_at and done.completed_at and not done.cancelled_at
    assert done.expires_at == done.created_at + 86_400
    assert done.usage is not None and done.usage.output_tokens == 120 and done.usage.input_tokens == 40 * 2
    results = await lines_in(sdk, done.output_file_id)
    assert [one["custom_id"] for one in results] == [f"r{i}" for i in range(40)]
    first = results[0]
    assert first.keys() == {"id", "custom_id", "response", "error"} and first["id"].startswith("batch_req_")
    assert first["error"] is None and first["response"].keys() == {"status_code", "request_id", "body"}
    assert first["response"]["status_code"] == 200 and first["response"]["request_id"]
    assert first["response"]["body"]["choices"][0]["text"] == "The"
    assert len(running.engine.requests) == 40
    assert await running.metric("diptych_batch_lines_total") == 40 and await running.metric("diptych_batches") == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", CHAT),
    ],
)
async def test_the_endpoints(sdk: openai.AsyncOpenAI, running: Any, path: str, body: dict[str, Any]) -> None:
    """Cached tokens are part of the input tokens, although `/v1/messages` counts them apart."""
    running.engine.cached = 2
    done = await ended(sdk, await made(sdk, [line("r", path, model="tiny-random", **body)], path))
    (result,) = await lines_in(sdk, done.output_file_id)
    assert "The" in json.dumps(result["response"]["body"]) and done.status == "completed"
    assert done.usage is not None and done.usage.output_tokens == 3
    assert done.usage.input_tokens == len(running.engine.requests[-1].prompt_token_ids) > 2
    assert done.usage.input_tokens_details.cached_tokens == 2


async def test_a_line_that_is_refused_is_in_the_error_file(sdk: openai.AsyncOpenAI) -> None:
    done = await ended(sdk, await made(sdk, [line("good"), line("bad", prompt="x", max_tokens=-1)]))
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    (bad,) = await lines_in(sdk, done.error_file_id)
    assert bad["custom_id"] == "bad" and bad["error"] is None and bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "max_tokens"
    assert [one["custom_id"] for one in await lines_in(sdk, done.output_file_id)] == ["good"]
    both = await sdk.files.list(purpose="batch_output")
    assert {file.id for file in both.data} == {done.output_file_id, done.error_file_id}


async def test_lines_are_of_the_class_batch(start: Any) -> None:
    running = await start(request_class=("name=fast,priority=3",))
    async with client_of(running) as sdk:
        lines = [line("a"), line("b", prompt="x", request_class="fast"), line("c", prompt="x", service_tier="default")]
        await ended(sdk, await made(sdk, lines))
    found = {(request.request_class, request.priority) for request in running.engine.requests}
    assert found == {("batch", -10), ("fast", 3), ("default", 0)}


async def test_the_operators_class_goes_before(start: Any) -> None:
    running = await start(request_class=("name=batch,priority=-2",))
    async with client_of(running) as sdk:
        await ended(sdk, await made(sdk, [line("a")]))
    assert [(one.request_class, one.priority) for one in running.engine.requests] == [("batch", -2)]


async def test_results_are_no_input(sdk: openai.AsyncOpenAI) -> None:
    done = await ended(
        sdk, await made(sdk, [line("a")], output_expires_after={"anchor": "created_at", "seconds": 3600})
    )
    assert done.output_file_id is not None
    file = await sdk.files.retrieve(done.output_file_id)
    assert file.expires_at == file.created_at + 3600 and file.filename == f"{done.id}_output.jsonl"
    with pytest.raises(openai.BadRequestError, match="got 'batch_output'"):
        await sdk.batches.create(input_file_id=done.output_file_id, endpoint=COMPLETIONS, completion_window="24h")


@pytest.mark.slow
async def test_batches_are_listed_in_pages(sdk: openai.AsyncOpenAI) -> None:
    batches = [await made(sdk, [line("a")]) for _ in range(5)]
    assert [one.id async for one in sdk.batches.list(limit=2)] == [one.id for one in batches[::-1]]
    with pytest.raises(openai.BadRequestError, match="batch 'batch_x' is not in this list"):
        await sdk.batches.list(after="batch_x")


@pytest.mark.slow
async def test_lines_wait_for_workers(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(is_ready=(False, "no worker")))
    async with client_of(running) as sdk:
        batch = await made(sdk, [line("a")])
        await tools.until(lambda: running.app.state.batches.running[0])
        await asyncio.sleep(0.05)
        assert running.engine.requests == []
        running.engine.is_ready = (True, "")
        assert (await ended(sdk, batch)).status == "completed"


async def test_so_many_lines_at_once_and_others_pass(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=0), batch_concurrency=3)
    async with client_of(running) as sdk:
        batch = await made(sdk, [line(f"{i}") for i in range(9)])
        await tools.until(lambda: len(running.engine.requests) == 3)
        assert await running.metric("diptych_batch_lines_running") == 3
        running.engine.hold_after = -1
        answer = await sdk.completions.create(model="tiny-random", prompt="hi", max_tokens=3)  # type: ignore[call-overload]
        assert answer.choices[0].text == "The"
        assert len(running.engine.requests) == 4, "no line began"
        running.engine.go.set()
        done = await ended(sdk, batch)
    assert done.request_counts is not None and done.request_counts.completed == 9


@pytest.mark.slow
async def test_two_batches_have_turns(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=0), batch_concurrency=2)
    async with client_of(running) as sdk:
        large = await made(sdk, [line(f"{i}", prompt="large", max_tokens=1) for i in range(50)])
        await tools.until(lambda: len(running.engine.requests) == 2)
        small = await made(sdk, [line(f"{i}", prompt="small", max_tokens=1) for i in range(4)])
        await tools.until(lambda: running.app.state.batches.running[0] == 2)
        running.engine.go.set()
        assert (await ended(sdk, small)).status == "completed"
        counts = (await sdk.batches.retrieve(large.id)).request_counts
        assert counts is not None and counts.completed < 50
        await ended(sdk, large)


async def test_a_cancelled_batch_keeps_what_it_answered(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(), batch_concurrency=2)
    async with client_of(running) as sdk:
        hold_from(running, 5)
        batch = await made(sdk, [line(f"{i}") for i in range(20)])
        await tools.until(lambda: len(running.engine.requests) >= 7)
        with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
            await sdk.files.delete(batch.input_file_id)
        asked = await sdk.batches.cancel(batch.id)
        assert asked.status == "cancelling" and asked.cancelling_at
        assert (await sdk.batches.cancel(batch.id)).status == "cancelling"
        running.engine.go.set()
        done = await ended(sdk, batch)
        assert done.status == "cancelled" and done.cancelled_at and done.request_counts is not None
        assert done.request_counts.completed == 7 and done.request_counts.total == 20
        assert len(await lines_in(sdk, done.output_file_id)) == 7
        assert (await sdk.batches.cancel(batch.id)).status == "cancelled"
        assert (await sdk.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await sdk.batches.cancel("batch_x")


def hold_from(running: Any, number: int) -> None:
    """Requests after so many wait for `go`."""
    engine, events = running.engine, running.engine._events

    async def held(request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        if len(engine.requests) > number:
            await engine.go.wait()
        async for event in events(request):
            yield event

    engine._events = held


@pytest.mark.slow
async def test_a_batch_whose_time_is_over(start: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.batches.service.WINDOW_S", 1.5)
    running = await start(tools.Engine(), batch_concurrency=2)
    async with client_of(running) as sdk:
        hold_from(running, 3)
        done = await ended(sdk, await made(sdk, [line(f"{i}") for i in range(9)]))
        assert done.status == "expired" and done.expired_at and done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (3, 6)
        assert len(await lines_in(sdk, done.output_file_id)) == 3
        late = await lines_in(sdk, done.error_file_id)
    assert {one["error"]["code"] for one in late} == {"batch_expired"} and all(one["response"] is None for one in late)
    assert len(running.engine.aborted) == 2


async def test_batches_are_bounded(start: Any, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_UNFINISHED", 2)
    path = tmp_path / "keys.toml"
    entry = '[[key]]\nname = "{}"\nsha256 = "{}"\n'
    path.write_text("".join(entry.format(name, digest_of(name.encode()).hex()) for name in ("alice", "bob")))
    running = await start(tools.Engine(hold_after=0), api_key_file=str(path))
    async with client_of(running, "alice") as alice, client_of(running, "bob") as bob:
        first = await made(alice, [line("a")])
        with pytest.raises(openai.RateLimitError, match="unfinished batches: 1 in total, 1 of this key") as full:
            await made(alice, [line("a")])
        assert int(full.value.response.headers["retry-after"]) == 60
        second = await made(bob, [line("a")])
        for asked in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await asked(first.id)
        assert [one.id async for one in bob.batches.list()] == [second.id]
        with pytest.raises(openai.NotFoundError):
            await bob.batches.create(input_file_id=first.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
        running.engine.go.set()
        await ended(alice, first)
        await ended(bob, second)
        await made(alice, [line("a")])
    assert {request.key for request in running.engine.requests} >= {"alice", "bob"}


async def test_lines_take_the_tokens_of_their_key(start: Any, tools: Any, tmp_path: Path) -> None:
    """And none of its requests, which are for people that wait."""
    path = tmp_path / "keys.toml"
    limits = "requests_per_minute = 5\ntokens_per_minute = 1000\nconcurrent_requests = 1\n"
    began_at = time.monotonic()
    path.write_text(f'[[key]]\nname = "alice"\nsha256 = "{digest_of(b"alice").hex()}"\n{limits}')
    running = await start(api_key_file=str(path))
    async with client_of(running, "alice") as sdk:
        batch = await made(sdk, [line(f"{i}") for i in range(20)])
        await tools.until(lambda: not running.app.state.batches.running[0])
        raw = await sdk.batches.with_raw_response.retrieve(batch.id)
        assert raw.parse().status == "completed"
        assert int(raw.headers["x-ratelimit-remaining-requests"]) >= 2
        given_back = 1000 / 60 * (time.monotonic() - began_at)
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) < 910 + given_back


async def test_a_key_that_is_gone_ends_its_batches(start: Any, tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    entry = '[[key]]\nname = "{}"\nsha256 = "{}"\n'
    path.write_text(entry.format("alice", digest_of(b"alice").hex()))
    running = await start(tools.Engine(hold_after=0), api_key_file=str(path), batch_concurrency=1)
    access = running.app.state.router_state.access
    async with client_of(running, "alice") as sdk:
        batch = await made(sdk, [line("a"), line("b")])
        await tools.until(lambda: running.engine.requests)
        ring = access.ring
        path.write_text(entry.format("bob", digest_of(b"bob").hex()))
        await access._reload_keys()
        running.engine.go.set()
        await tools.until(lambda: not running.app.state.batches.running[0])
        access.ring = ring
        failed = await sdk.batches.retrieve(batch.id)
        assert failed.status == "failed" and failed.errors is not None and failed.errors.data is not None
        assert failed.errors.data[0].code == "key_not_found"
        assert len(await lines_in(sdk, failed.output_file_id)) == 1


@pytest.mark.slow
async def test_a_router_that_ends_leaves_its_batches_to_the_next(start: Any, tools: Any, tmp_path: Path) -> None:
    store = str(tmp_path / "responses.sqlite3")
    running = await start(tools.Engine(), batch_concurrency=2, response_store=store)
    async with client_of(running) as sdk:
        hold_from(running, 5)
        batch = await made(sdk, [line(f"{i}") for i in range(20)])
        await tools.until(lambda: len(running.engine.requests) >= 7)
    running.app.state.router_state.draining = True
    await running.app.state.batches.close()
    assert len(running.engine.aborted) == 2
    again = await start(tools.Engine(), response_store=store)
    again.app.state.batches.start()
    async with client_of(again) as sdk:
        done = await ended(sdk, batch)
        results = await lines_in(sdk, done.output_file_id)
    assert done.status == "completed" and len({one["custom_id"] for one in results}) == len(results) == 20
    assert len(again.engine.requests) == 15
    for name in ("responses.sqlite3", "responses-files.sqlite3"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


async def test_a_draining_router_begins_nothing(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=0), batch_concurrency=2)
    async with client_of(running) as sdk:
        file = await sdk.files.create(file=("a", json.dumps(line("a")).encode()), purpose="batch")
        batch = await made(sdk, [line(f"{i}") for i in range(9)])
        await tools.until(lambda: len(running.engine.requests) == 2)
        running.app.state.router_state.draining = True
        running.app.state.batches.drain()
        running.engine.go.set()
        await tools.until(lambda: not running.app.state.batches.running[0])
        assert len(running.engine.requests) == 2
        now = await sdk.batches.retrieve(batch.id)
        assert now.status == "in_progress" and now.request_counts is not None and now.request_counts.completed == 2
        for asked in (
            made(sdk, []),
            sdk.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"),
        ):
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await asked


async def test_a_draining_router_leaves_batches_to_others(tmp_path: Path) -> None:
    now = 1000.0
    clock = WallClock(lambda: now, lambda: now)
    bounds: Any = {"max_bytes": 10**6, "max_entries": 20, "max_age_s": 1e6, "chore_s": 3600.0}
    first, second = (FileStore(str(tmp_path / "files.sqlite3"), clock=clock, **bounds) for _ in range(2))
    batch = StoredBatch("batch_1", "", IN_PROGRESS, COMPLETIONS, "file-1", "out", "err", now, now + 1e6, 100.0)
    await second.batches.create(batch, lambda total, own: None)
    await second.batches.release()
    router_state: Any = SimpleNamespace(config=SimpleNamespace(batch_concurrency=1))
    unused: Any = None
    batches = service.BatchService(router_state, first, unused)
    batches.start()
    pass_on, claimed = first.batches.on_news, list[StoredBatch]()

    def drain(news: BatchChanges) -> None:
        """The signal arrives while the claim is on its way to the event loop."""
        claimed.extend(news.claimed)
        batches.drain()
        pass_on(news)

    first.batches.on_news = drain
    await first.batches.look()
    assert [one.id for one in claimed] == ["batch_1"] and batches.running == (0, 0)
    now += LEASE_S + 1
    await first.batches.look()
    theirs: list[BatchChanges] = []
    second.batches.on_news, second.batches.max_claimed = theirs.append, 5
    await second.batches.look()
    assert [one.id for one in theirs[-1].claimed] == ["batch_1"]
    await batches.close()
    second.close()


async def test_a_batch_has_its_lines_in_the_log(sdk: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    batch = await made(sdk, [line("a")])
    await ended(sdk, batch)
    told = [record for record in caplog.records if record.message == "batch"]
    assert [record.__dict__["status"] for record in told] == ["validating", "completed"]
    assert told[-1].__dict__["lines"] == 1 and told[-1].__dict__["id"] == batch.id
    (request,) = (record for record in caplog.records if record.message == "request")
    assert request.__dict__["path"] == COMPLETIONS and request.__dict__["request_id"].startswith("batch_req_")
