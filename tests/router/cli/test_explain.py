"""`diptych explain`: the response of `/explain` as text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from msgspec.structs import replace

from router.cli.explain import main, text_of
from router.dispatch import Step

from ..policy.test_routing import choose, pool


def with_trail(engine: Any) -> Any:
    """An engine that records the steps of a request which lost its first worker."""
    inner = engine._events

    async def events(request: Any) -> Any:
        began = asyncio.get_running_loop().time()
        for step in (
            Step(began, "accepted"),
            Step(began, "placed", "remote", choose(pool())),
            Step(began, "failed", "prefill worker p0 was lost: \x1b[31mgone"),
            Step(began, "placed", "remote", choose(pool())),
        ):
            request.trail.add(step)
        async for event in inner(request):
            line = event.timeline and replace(event.timeline, num_attempts=2)
            yield replace(event, timeline=line)

    engine._events = events
    return engine


async def test_a_timeline_with_decisions_and_failures(start: Any, tools: Any, capsys: Any) -> None:
    running = await start(with_trail(tools.Engine()), slo_ttft_ms=60_000.0)
    reply = await running.completion(max_tokens=5)
    assert await asyncio.to_thread(main, [reply.headers["x-request-id"], "--url", running.url]) == 0
    shown = capsys.readouterr().out
    for text in (
        f"request {reply.headers['x-request-id']}  {reply.json()['id']}",
        "finished with status 200",
        "prompt 2 tokens (0 from a prefix cache), output 5 tokens",
        "worker queue",
        "prefill-0 to decode-0, first to last KV block",
        "2 attempts",
        "goal 60 s, met",
        "* p0 (prefill)",
        "prefill worker p0 was lost: ?[31mgone",
    ):
        assert text in shown
    assert max(map(len, shown.splitlines())) < 160
    assert await asyncio.to_thread(main, [reply.json()["id"], "--url", running.url, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in body["choices"][0]["stages"]][:3] == ["receive", "router queue", "worker queue"]
    assert "\n".join(text_of(body)) + "\n" == shown


async def test_an_unknown_request_is_said(running: Any, capsys: Any) -> None:
    assert await asyncio.to_thread(main, ["nope", "--url", running.url]) == 1
    assert "The request 'nope' is unknown here." in capsys.readouterr().err
