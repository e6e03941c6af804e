"""Bytes that are no HTTP end their connection, and odd but valid requests are answered."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from router.server import http_connection as connection_module
from router.server.http_connection import MAX_PIPELINED

from ..raw_http import BODY, GET, POST, Connect, all_of, error_in, raw, rejected

pytestmark = pytest.mark.usefixtures("unread_bytes_are_awaited")


# ---------------------------------------------------------------- what is no HTTP


HOSTILE = {
    "garbage": b"\x00\x01\x02\xff" * 100,
    "TLS to a plain port": bytes.fromhex("16030100750100007103030000000000000000000000000000000000"),
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no method": b" / HTTP/1.1\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a URL that is none": b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a URL beyond ASCII": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a huge length": POST + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "a huge chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc",
    "an upgrade with a bad chunk": POST
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "a chunk that is longer": POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_no_http_ends_the_connection(running: Any, connect: Connect, caplog: Any, name: str) -> None:
    reader, writer = await connect(running)
    writer.write(HOSTILE[name])
    writer.write_eof()
    answer = await all_of(reader)
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), answer
    assert running.engine.requests == []
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert (await running.http.get("/health")).status_code == 200


async def test_random_bytes_do_no_harm(running: Any, connect: Connect) -> None:
    """Valid requests with changed, lost and repeated bytes, sent in pieces."""
    rng = random.Random(7)
    whole = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + GET
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        reader, writer = await connect(running)
        cut = rng.randrange(len(data))
        for part in (data[:cut], data[cut:]):
            writer.write(bytes(part))
            await asyncio.sleep(0)
        writer.write_eof()
        answer = await all_of(reader)
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer
        assert b"HTTP/1.1 5" not in answer, (data, answer)
    assert (await running.completion(max_tokens=2)).status_code == 200


async def test_pipelined_requests_are_answered_in_order(running: Any, connect: Connect) -> None:
    ask = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = await raw(running, connect, ask * 3 + last)
    assert answer.count(b"HTTP/1.1 200") == 4 and answer.index(b'"version"') > answer.rindex(b"text_completion")


async def test_too_many_pipelined_requests(running: Any, connect: Connect) -> None:
    answer = await raw(running, connect, GET * (MAX_PIPELINED + 10))
    assert answer.count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1
    assert await rejected(running, "pipelined") == 1


async def test_garbage_behind_a_request_waits_for_its_answer(start: Any, tools: Any, connect: Connect) -> None:
    running = await start()
    running.engine.hold_after = 1
    reader, writer = await connect(running)
    writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    await tools.until(lambda: running.engine.requests)
    writer.write(b"\x00garbage")
    await asyncio.sleep(0.05)
    running.engine.go.set()
    answer = await all_of(reader)
    assert answer.count(b"HTTP/1.1") == 1 and b"text_completion" in answer and running.engine.aborted == []


async def test_a_trailer_is_no_header(start: Any, connect: Connect) -> None:
    running = await start(api_key="the-only-key")
    trailer = b"0\r\nAuthorization: Bearer the-only-key\r\n\r\n"
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await raw(running, connect, head + b"%x\r\n%s\r\n" % (len(BODY), BODY) + trailer)
    assert answer.startswith(b"HTTP/1.1 401")


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


async def test_an_upgrade_is_ignored(running: Any, connect: Connect) -> None:
    data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert (await raw(running, connect, data)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "rest", [b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY), CHUNKED], ids=["a length", "chunks"]
)
@pytest.mark.parametrize("piece", [1, 50, 10_000])
async def test_a_body_behind_a_declined_upgrade_is_read(
    running: Any, connect: Connect, rest: bytes, piece: int
) -> None:
    """Java's HTTP client asks for an upgrade to HTTP/2 with each first request."""
    ask = POST + UPGRADE + rest
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    reader, writer = await connect(running)
    data = ask * 3 + last
    for at in range(0, len(data), piece):
        writer.write(data[at : at + piece])
        await asyncio.sleep(0)
    answer = await all_of(reader)
    assert answer.count(b"HTTP/1.1 200") == 4 and answer.index(b'"version"') > answer.rindex(b"text_completion")
    assert [len(request.prompt_token_ids) for request in running.engine.requests] == [2] * 3


@pytest.mark.parametrize(
    "sent", [b"", b"Content-Type: application/x-www-form-urlencoded\r\n", b"Content-Type: text/plain\r\n"]
)
@pytest.mark.parametrize("num_bytes", [0, 3_000_000])
async def test_a_body_must_be_said_to_be_json(running: Any, connect: Connect, sent: bytes, num_bytes: int) -> None:
    """A web page may send these types to any site; `curl -d` sends the second."""
    body = BODY + b" " * num_bytes
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = await raw(running, connect, head + sent + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert error_in(answer) == (415, "unsupported_media_type")
    assert b"must be application/json" in answer and running.engine.requests == []


@pytest.mark.parametrize(
    "hosts",
    [b"", b"Host: localhost\r\nHost: localhost\r\n", b"Host: a/b\r\n", b"Host: a@localhost\r\n", b"Host: \xff\r\n"],
)
async def test_a_request_has_one_host(running: Any, connect: Connect, hosts: bytes) -> None:
    answer = await raw(running, connect, b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n")
    assert error_in(answer) == (400, "invalid_request_error") and b"Host header" in answer
    assert await rejected(running, "malformed") == 1


CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "a chunk extension": CHUNKS + b"3;" + b"a" * 10_000_000,
    "a trailer": CHUNKS + b"1\r\n \r\n0\r\nX: " + b"a" * 10_000_000,
    "chunks of a byte": CHUNKS + b"1\r\n \r\n" * 2_000_000,
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\n \r\n0\r\n\r\n",
    "version 2.0": GET.replace(b"1.1", b"2.0"),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_framing_that_is_no_use_is_refused(running: Any, connect: Connect, caplog: Any, name: str) -> None:
    """Little of it is kept in memory, and the parser does not call back millions of times."""
    reader, writer = await connect(running)
    writer.write(ENDLESS[name])
    answer = await all_of(reader)
    assert error_in(answer) == (400, "invalid_request_error") and answer.count(b"HTTP/1.1") == 1
    assert running.engine.requests == [] and await rejected(running, "malformed") == 1
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("size", [1, 32])
async def test_small_chunks(running: Any, connect: Connect, size: int) -> None:
    body = BODY + b" " * (5_000 if size == 1 else 100_000)
    chunks = [b"%x\r\n%s\r\n" % (len(body[at : at + size]), body[at : at + size]) for at in range(0, len(body), size)]
    answer = await raw(
        running,
        connect,
        CHUNKS.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"".join(chunks) + b"0\r\n\r\n",
    )
    assert b"text_completion" in answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"Content-Type: application/json\r\nContent-Length: 99999999\r\n", 413),
        (b"Content-Type: text/plain\r\nContent-Length: 9\r\n", 415),
    ],
)
async def test_who_waits_to_be_asked_for_a_refused_body_is_not_asked(
    running: Any, connect: Connect, sent: bytes, status: int
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    answer = await raw(running, connect, head + sent + b"\r\n")
    assert error_in(answer)[0] == status and b"100 Continue" not in answer


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(
    ("path", "status"),
    [("/nowhere", 404), ("/v1/models", 405), ("/ping", 200), ("/v1/completions", 415), ("/v1/files", 415)],
)
@pytest.mark.parametrize("response_store", ["memory"])
async def test_the_last_answer_is_not_lost_with_an_unread_body(
    running: Any, connect: Connect, version: bytes, path: str, status: int
) -> None:
    """To close a connection whose client still sends would reset it, and the client would not read the answer."""
    reader, writer = await connect(running)
    writer.write(
        b"POST %s HTTP/%s\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 6000000\r\n\r\n"
        % (path.encode(), version)
    )
    for _ in range(60):
        writer.write(b"x" * 100_000)
        await writer.drain()
        await asyncio.sleep(0)
    assert (await all_of(reader)).startswith(b"HTTP/1.1 %d " % status)


# ---------------------------------------------------------------- HTTP/1.0


@pytest.mark.parametrize("head", [b"", b"Host: localhost\r\n", b"Connection: keep-alive\r\nExpect: 100-continue\r\n"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(running: Any, connect: Connect, head: bytes, stream: bool) -> None:
    body = BODY[:-1] + (b', "stream": true}' if stream else b"}")
    start = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    answer = await raw(running, connect, start + head + b"\r\n" + body)
    fields, _, content = answer.partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 200 OK") and b"chunked" not in fields and b"connection: close" in fields
    if stream:
        assert b"content-length" not in fields
        assert content.startswith(b"data: {") and content.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert b"content-length: %d\r\n" % len(content) in fields and json.loads(content)["choices"]


# ---------------------------------------------------------------- HEAD


@pytest.mark.parametrize(
    "path", ["/", "/dashboard", "/docs", "/health", "/ready", "/ping", "/metrics", "/version", "/load", "/v1/models",
             "/v1/models/tiny-random", "/tokenizer_info", "/openapi.json", "/v1/files", "/v1/batches", "/nowhere",
             "/v1/responses/resp_0", "/v1/completions"],
)  # fmt: skip
async def test_head_is_answered_as_get_without_the_body(running: Any, connect: Connect, path: str) -> None:
    whole = await running.http.get(path)
    reader, writer = await connect(running)
    writer.write(b"HEAD %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert head.startswith(f"http/1.1 {whole.status_code} ")
    for name in ("content-type", "allow", "content-security-policy"):
        assert whole.headers.get(name, "").lower() in head
    if path not in ("/metrics", "/load"):  # which change
        assert abs(int(head.partition("content-length: ")[2].split()[0]) - len(whole.content)) <= (
            whole.status_code == 405
        )
    writer.write(GET)
    assert (await reader.readuntil(b"}")).endswith(b'{"status":"ok"}'), "the next answer follows at once"


@pytest.mark.parametrize("response_store", ["memory"])
async def test_head_does_not_read_a_file(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"file": ("a", b"x" * 3_000_000)}
    file = (await running.http.post("/v1/files", files=form, data={"purpose": "batch"})).json()["id"]
    store = running.app.state.batches.store
    reads: list[Any] = []
    read = store.read

    def counted(*at: Any) -> Any:
        reads.append(at)
        return read(*at)

    monkeypatch.setattr(store, "read", counted)
    reply = await running.http.head(f"/v1/files/{file}/content")
    assert (reply.status_code, reply.headers["content-length"], reply.content) == (200, "3000000", b"")
    assert len(reads) <= 1
    assert len((await running.http.get(f"/v1/files/{file}/content")).content) == 3_000_000 and len(reads) >= 3


# ---------------------------------------------------------------- clients that close one side, or leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
async def test_a_half_closed_client_is_answered(
    running: Any, tools: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch, stream: bool, num_before: int
) -> None:
    """Between the requests and the answers the client gets interim responses, which show whether it is there."""
    monkeypatch.setattr(connection_module, "PROBE_S", 0.01)
    running.engine.hold_after = 1
    body = BODY[:-1] + (b', "stream": true}' if stream else b"}")
    reader, writer = await connect(running)
    writer.write(GET * num_before + POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    writer.write_eof()
    await tools.until(lambda: running.engine.requests)
    heard = b""
    while not stream and heard.count(b"HTTP/1.1 100 Continue\r\n\r\n") < 2:
        heard += await reader.read(65536)
    running.engine.go.set()
    answer = heard + await all_of(reader)
    assert answer.count(b"HTTP/1.1 200 OK") == 1 + num_before and running.engine.aborted == []
    assert answer.endswith(b"0\r\n\r\n" if stream else b"}")
    assert not stream or b"[DONE]" in answer


@pytest.mark.parametrize(
    "sent", [b"", b"GET /hea", POST + b"Content-Length: 10\r\n\r\n{", POST.replace(b"1.1", b"1.0") + b"\r\n"]
)
async def test_half_a_request_is_not_answered(running: Any, connect: Connect, sent: bytes) -> None:
    reader, writer = await connect(running)
    writer.write(sent)
    writer.write_eof()
    answer = await all_of(reader)
    assert not answer.startswith(b"HTTP/1.1 200") and b"100 Continue" not in answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [b"", GET])
async def test_a_client_that_leaves_is_not_taken_for_a_half_closed_one(
    running: Any, tools: Any, connect: Connect, stream: bool, behind: bytes
) -> None:
    """Also with another request in the pipeline, whose end uvicorn notices in place of that of the running one."""
    running.engine.hold_after = 1
    body = BODY[:-1] + (b', "stream": true}' if stream else b"}")
    _, writer = await connect(running)
    writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + behind)
    await tools.until(lambda: running.engine.requests)
    writer.close()
    async with asyncio.timeout(10):
        await tools.until(lambda: running.engine.aborted)
    assert not running.engine.go.is_set()
