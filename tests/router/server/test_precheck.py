"""A service without room refuses before it reads a body, and the unread bytes do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import Overloaded
from router.request.paths import GENERATING
from router.server import http_connection as connection_module

pytestmark = pytest.mark.usefixtures("unread_bytes_are_awaited")
KEY = "alices-secret-key-1"
PATHS = sorted(GENERATING)
NO_JSON = b"x" * 300_000
"""A server that reads it answers 400."""
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[Any], Awaitable[Pipe]]


def overloaded() -> Overloaded:
    return Overloaded("The request would wait about 42.0 s; the limit is 30 s.", retry_after_s=12.0)


def post(num_bytes: int, *headers: bytes, path: str = "/v1/completions") -> bytes:
    lines = (b"Host: localhost", b"Content-Type: application/json", b"Content-Length: %d" % num_bytes, *headers)
    return b"POST %s HTTP/1.1\r\n" % path.encode() + b"\r\n".join(lines) + b"\r\n\r\n"


async def answer(reader: asyncio.StreamReader) -> tuple[int, str, Any]:
    """Status, head and body of the next answer on a connection."""
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return int(head.split()[1]), head, json.loads(await reader.readexactly(length))


@pytest.fixture
async def full(start: Any, tools: Any) -> Any:
    return await start(tools.Engine(full=overloaded()), header_timeout_s=0.1)


@pytest.mark.slow
async def test_these_paths_generate(running: Any) -> None:
    routes = running.app.openapi()["paths"]
    assert {path for path, how in routes.items() if "generate" in how.get("post", {}).get("tags", ())} == GENERATING


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_does_not_wait_for_the_body(full: Any, connect: Connect, path: str) -> None:
    reader, writer = await connect(full)
    writer.write(post(len(NO_JSON), path=path))
    status, head, body = await answer(reader)
    assert status == 429
    if path.startswith("/api/"):
        assert isinstance(body["error"], str)
    else:
        assert body["error"]["type"] == "rate_limit_error"
        assert body["error"].get("code") == (None if path == "/v1/messages" else "rate_limit_exceeded")
    assert "retry-after: 12\r\n" in head and "x-request-id" in head and "connection: close" not in head
    assert full.engine.requests == []


async def test_a_body_that_was_not_read_is_not_the_next_request(full: Any, connect: Connect) -> None:
    reader, writer = await connect(full)
    for _ in range(3):
        writer.write(post(len(GET) * 1000))
        assert (await answer(reader))[0] == 429
        writer.write(GET * 1000)  # a thousand answers would follow if these were taken for requests
        writer.write(GET)
        assert (await answer(reader))[2] == {"status": "ok"}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.05)
    assert len(full.server.server_state.connections) == 1


async def test_the_connection_rests_as_long_as_any_other_afterwards(full: Any, tools: Any, connect: Connect) -> None:
    reader, writer = await connect(full)
    writer.write(post(len(NO_JSON)))
    await answer(reader)
    writer.write(NO_JSON)
    (connection,) = full.server.server_state.connections
    await tools.until(lambda: connection.timeout_keep_alive_task is not None and connection.awaiting_since is None)
    await asyncio.sleep(0.15)  # longer than a head may take
    full.server.check_connections()
    full.engine.full = None
    body = b'{"prompt": "hi", "max_tokens": 3}'
    writer.write(post(len(body)) + body)
    assert (await answer(reader))[0] == 200


async def test_the_rest_of_a_body_may_not_come_for_ever(full: Any, tools: Any, connect: Connect) -> None:
    reader, writer = await connect(full)
    writer.write(post(len(NO_JSON)))
    await answer(reader)
    writer.write(b"x")
    (connection,) = full.server.server_state.connections
    await tools.until(lambda: connection.awaiting_since is not None)
    await asyncio.sleep(0.15)
    full.server.check_connections()
    assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_nor_may_it_be_endless(full: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_DISCARDED_BYTES", 1_000_000)
    reader, writer = await connect(full)
    writer.write(post(10**12))
    await answer(reader)
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            writer.write(NO_JSON)
            await writer.drain()
        pytest.fail("thirty megabytes were taken")
    assert (
        await full.metric('diptych_http_rejected_total{engine="router",model_name="tiny-random",reason="unread"') == 1
    )


async def test_who_waits_to_be_asked_for_the_body_is_not_asked(full: Any, connect: Connect) -> None:
    reader, writer = await connect(full)
    writer.write(post(len(NO_JSON), b"Expect: 100-continue"))
    status, head, _ = await answer(reader)
    assert status == 429 and "connection: close" in head
    assert await asyncio.wait_for(reader.read(), 60) == b""


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_who_wants_no_other_answer_gets_this_one_whole(full: Any, connect: Connect, version: bytes) -> None:
    """The client writes before it reads: an early close would reset the connection and lose the answer."""
    reader, writer = await connect(full)
    head = post(len(NO_JSON), *((b"Connection: close",) if version == b"HTTP/1.1" else ()))
    for part in (head.replace(b"HTTP/1.1", version), NO_JSON[:1000], NO_JSON[1000:]):
        writer.write(part)
        await asyncio.sleep(0.02)
    assert (await answer(reader))[0] == 429
    assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_clients_that_write_before_they_read_get_the_refusal(full: Any) -> None:
    for num_bytes in (10, 300_000, 3_000_000):
        for _ in range(3):
            reply = await full.completion(prompt="x" * num_bytes)
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "12")
    assert (await full.http.get("/health")).status_code == 200


@pytest.mark.slow
async def test_keys_and_counters_are_right(start: Any, tools: Any, tmp_path: Path) -> None:
    keys, audit = tmp_path / "keys.toml", tmp_path / "audit.log"
    keys.write_text(f'[[key]]\nname = "alice"\nkey = "{KEY}"\nrequests_per_minute = 2\ntokens_per_minute = 1000\n')
    engine = tools.Engine(full=overloaded())
    running = await start(
        engine, api_key_file=str(keys), audit_log=str(audit), headers={"authorization": f"Bearer {KEY}"}
    )
    assert (await running.completion()).headers["x-ratelimit-remaining-tokens"] == "1000"
    reply = await running.chat()
    assert (reply.status_code, reply.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    assert "alice" in (await running.chat()).json()["error"]["message"], "the key's own limit comes first"
    stranger = await running.http.post("/v1/completions", headers={"authorization": "Bearer wrong"}, json={})
    assert stranger.status_code == 401, "so does who it is"
    await tools.until(lambda: audit.exists() and len(audit.read_bytes().splitlines()) == 4)
    lines = [json.loads(line) for line in audit.read_bytes().splitlines()]
    assert [(line["key"], line["status"], line["error"]) for line in lines] == [
        ("alice", 429, "Overloaded"),
        ("alice", 429, "Overloaded"),
        ("alice", 429, "RateLimited"),
        (None, 401, "Unauthorized"),
    ]
    label = 'engine="router",model_name="tiny-random"'
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert await running.metric(f'diptych_http_requests_total{{{label},path="{path}",status="429"') == 1
    assert await running.metric(f'diptych_http_errors_total{{{label},status="429"') == 3


async def test_a_router_that_ends_reads_nothing_more(running: Any, connect: Connect) -> None:
    running.app.state.router_state.refusing = True
    reader, writer = await connect(running)
    writer.write(post(len(NO_JSON)))
    assert (await answer(reader))[0] == 503


async def test_other_methods_and_paths_have_their_own_answers(full: Any) -> None:
    assert (await full.http.get("/v1/completions")).status_code == 405
    assert (await full.http.get("/v1/models")).status_code == 200
    assert (await full.http.post("/tokenize", json={"prompt": "hi"})).status_code == 200


LONG = "some words and more " * 40


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/completions", {"prompt": "hi"}, 200),
        ("/v1/completions", {"prompt": [1] * 64}, 200),
        ("/v1/completions", {"prompt": [1] * 65}, 429),
        ("/v1/completions", {"prompt": ["hi", LONG]}, 429),
        ("/v1/completions", {"prompt": [[1], [1] * 65]}, 429),
        ("/v1/completions", {"prompt": ["hi"] * 100, "user": "x" * 4000}, 200),
        ("/v1/completions", {"prompt": "hi", "unknown": "x" * 100_000}, 200),
        ("/invocations", {"prompt": ["hi"] * 100, "unknown": "x" * 100_000}, 200),
        ("/invocations", {"messages": [{"role": "user", "content": LONG}]}, 429),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "unknown": "x" * 60_000}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 429),
    ],
)
async def test_a_short_prompt_finds_room_where_a_long_one_does_not(
    start: Any, tools: Any, path: str, fields: dict[str, Any], status: int
) -> None:
    running = await start(tools.Engine(full=overloaded(), most_when_full=64))
    reply = await running.http.post(path, json={"max_tokens": 2, **fields})
    assert reply.status_code == status, reply.text
    assert bool(running.engine.requests) == (status == 200)


async def test_a_conversation_too_large_to_be_short_is_not_read(start: Any, tools: Any, connect: Connect) -> None:
    running = await start(tools.Engine(full=overloaded(), most_when_full=64))
    reader, writer = await connect(running)
    writer.write(post(len(NO_JSON), path="/v1/chat/completions"))
    assert (await answer(reader))[0] == 429
