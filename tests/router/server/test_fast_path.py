"""The endpoints of generation give the same answers with and without the short cut past FastAPI."""

from __future__ import annotations

from typing import Any

from common.errors import Overloaded


async def answers(running: Any) -> list[tuple[int, Any]]:
    """Status and text or error of a good request, a wrong one and one that finds no room."""
    replies = [await running.chat(max_tokens=3), await running.chat(max_tokens=0)]
    running.engine.full = running.engine.no_room
    replies.append(await running.chat(max_tokens=3))
    running.engine.full = None
    bodies = [reply.json() for reply in replies]
    shown = [body["error"] if "error" in body else body["choices"][0]["message"]["content"] for body in bodies]
    return [(reply.status_code, one) for reply, one in zip(replies, shown, strict=True)]


async def test_fastapi_calls_the_same_endpoints(running: Any) -> None:
    running.engine.no_room = Overloaded("full", retry_after_s=3.0)
    found = await answers(running)
    assert [status for status, _ in found] == [200, 400, 429]
    counted = await running.metric("diptych_http_errors_total")
    running.app.fast_path = None
    assert await answers(running) == found
    assert await running.metric("diptych_http_errors_total") == 2 * counted > 0
