"""Bytes sent to a server as they are, and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "hi", "max_tokens": 3}'
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[Any], Awaitable[Pipe]]


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the server closes the connection."""
    async with asyncio.timeout(60):
        try:
            return await reader.read()
        except ConnectionError:  # the server closed before it read all bytes
            return b""


async def raw(running: Any, connect: Connect, data: bytes) -> bytes:
    reader, writer = await connect(running)
    writer.write(data)
    return await all_of(reader)


def error_in(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head and b"close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"] or error["type"]


async def rejected(running: Any, reason: str) -> float:
    label = f'engine="router",model_name="tiny-random",reason="{reason}"'
    count: float = await running.metric(f"diptych_http_rejected_total{{{label}")
    return count


async def closed(running: Any) -> None:
    """Let the server's clock tick until it has closed every connection."""
    async with asyncio.timeout(60):
        while running.server.server_state.connections:
            running.server.check_connections()
            await asyncio.sleep(0.01)
