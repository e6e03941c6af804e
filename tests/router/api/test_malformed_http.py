"""Bytes that are no HTTP end their connection, and odd but valid requests are answered."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from router.server.http_connection import MAX_PIPELINED

from .raw_http import BODY, GET, POST, Connect, all_of, raw, rejected

# ---------------------------------------------------------------- what is no HTTP


HOSTILE = {
    "garbage": b"\x00\x01\x02\xff" * 100,
    "TLS to a plain port": bytes.fromhex("16030100750100007103030000000000000000000000000000000000"),
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no method": b" / HTTP/1.1\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a URL that is none": b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a URL beyond ASCII": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
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
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await raw(running, connect, ask * 3 + last)
    assert answer.count(b"HTTP/1.1 200") == 4 and answer.index(b"version") > answer.rindex(b"text_completion")


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
    data = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
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
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    reader, writer = await connect(running)
    data = ask * 3 + last
    for at in range(0, len(data), piece):
        writer.write(data[at : at + piece])
        await asyncio.sleep(0)
    answer = await all_of(reader)
    assert answer.count(b"HTTP/1.1 200") == 4 and answer.index(b"version") > answer.rindex(b"text_completion")
    assert [len(request.prompt_token_ids) for request in running.engine.requests] == [2] * 3


async def test_a_body_without_a_content_type_counts_as_json(running: Any, connect: Connect) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    assert b"text_completion" in await raw(running, connect, head + BODY)
