import asyncio
import socket

import httpx
import pytest

from benchmarks.load.client import (
    FALLBACK_TOKEN_IDS,
    CompletionClient,
    EventReader,
    RequestOptions,
    ServerError,
    ask_server,
    ask_token_ids,
)
from benchmarks.load.http_stream import HttpPool
from benchmarks.load.summary import RequestRecord
from benchmarks.load.workload import RequestPlan
from benchmarks.stack import free_port

from ..conftest import ScriptedServer

PLAN = RequestPlan(0, [5, 6, 7], 3, 4)


def complete(url: str, model: str, *, chat: bool = False, timeout_s: float = 10.0, count: int = 1) -> RequestRecord:
    """The record of the last of `count` requests, one after the other."""

    async def run() -> RequestRecord:
        client = CompletionClient(url, RequestOptions(model, chat=chat, timeout_s=timeout_s))
        for index in range(count):
            record = RequestRecord(index)
            await client.complete(PLAN, record)
        await client.close()
        return record

    return asyncio.run(run())


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_usage_and_times(server: ScriptedServer, chat: bool) -> None:
    record = complete(server.url, "good", chat=chat)
    assert (record.outcome, record.prompt_tokens, record.cached_tokens, record.output_tokens) == ("ok", 77, 16, 4)
    assert len(record.token_times) == 4
    assert [record.start, *record.token_times] == sorted([record.start, *record.token_times])


def test_what_is_sent(server: ScriptedServer) -> None:
    complete(server.url, "good")
    body = server.bodies[-1]
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (4, 0.0, True, True)


def test_connections_are_reused(server: ScriptedServer) -> None:
    assert complete(server.url, "good", count=3).outcome == "ok"


def test_without_usage_events_are_counted(server: ScriptedServer) -> None:
    record = complete(server.url, "silent")
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == ("ok", 3, 4)


@pytest.mark.parametrize(
    ("model", "outcome", "message", "tokens"),
    [
        ("busy", "http 503", "no worker", 0),
        ("breaks", "stream error", "worker lost", 2),
        ("cut", "truncated", "without a finish reason", 2),
    ],
)
def test_failures_are_outcomes(server: ScriptedServer, model: str, outcome: str, message: str, tokens: int) -> None:
    record = complete(server.url, model)
    assert record.outcome == outcome
    assert message in record.message
    assert len(record.token_times) == tokens


def test_a_timeout_is_an_outcome(server: ScriptedServer) -> None:
    assert complete(server.url, "slow", timeout_s=0.08).outcome == "timeout"


def test_nobody_listens() -> None:
    assert complete(f"http://127.0.0.1:{free_port()}", "good").outcome == "connect"


async def record_of(answer: bytes) -> RequestRecord:
    """The record of a request to a server that sends these bytes and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        record = RequestRecord(0)
        await CompletionClient(f"http://{host}:{port}", RequestOptions("m")).complete(PLAN, record)
        return record


async def test_a_server_that_hangs_up_in_mid_stream() -> None:
    record = await record_of(b'HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\ndata: {"choices":[{"text":"a"}]}\n\n')
    assert (record.outcome, len(record.token_times)) == ("truncated", 1)


async def test_a_server_that_speaks_no_http() -> None:
    assert (await record_of(b"hello there\r\n\r\n")).outcome == "bad answer"


async def test_a_request_that_its_last_bytes_cancel_leaves_no_connection() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        await reader.read()  # until the client closes
        closed.set()
        writer.close()

    def leave(at: float, data: bytes) -> None:
        post.cancel()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        pool = HttpPool(f"http://{host}:{port}")
        post = asyncio.ensure_future(pool.post("/", b"", leave, leave))
        with pytest.raises(asyncio.CancelledError):
            await post
        await asyncio.wait_for(closed.wait(), 60)


def test_events_over_any_cut() -> None:
    stream = b': hi\n\ndata: {"a":1}\r\n\r\ndata:[DONE]\n\n'
    for size in range(1, len(stream)):
        reader = EventReader()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [event for piece in pieces for event in reader.feed(piece)] == [b'{"a":1}', b"[DONE]"]


def test_the_server_is_asked_for_its_model_and_tokens(server: ScriptedServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert ask_server(client, "").model == "good"
        assert ask_server(client, "other").model == "other"
        assert max(ask_token_ids(client, "good")) < 256
        assert ask_token_ids(client, "good", vocab_size=300) == tuple(range(75, 300))


def test_a_server_without_tokenize_gets_common_ids() -> None:
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(404)), base_url="http://x") as client:
        assert ask_token_ids(client, "m") == tuple(FALLBACK_TOKEN_IDS)


def test_a_server_that_does_not_run_is_named_with_the_remedy() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with httpx.Client(base_url=url) as client, pytest.raises(ServerError) as refused:
            ask_server(client, "")
        assert str(refused.value).startswith(f"no server answers at {url} (")
        assert str(refused.value).endswith("start one with `diptych serve`, or name another with --url")
