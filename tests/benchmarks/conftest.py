"""A real HTTP server that streams completions, well or badly, as the model's name asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..interpreter import ask_for_interpreter

ask_for_interpreter()


END_S = 30.0


class ScriptedServer:
    """Remembers the bodies it was sent. Models: good, slow, late, turns (one at a time), busy, breaks, cut, silent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_readings = 0
        self._turn = asyncio.Lock()
        app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/diptych/load", self.load),
                Route("/diptych/metrics", self.metrics),
            ]
        )
        # Models that are late or silent do not keep it: a client may be gone without its connection's end having come.
        options = {"log_level": "error", "loop": "asyncio", "timeout_graceful_shutdown": 1}
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, **options))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(END_S)
        assert not self._thread.is_alive()

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "good", "max_model_len": 2048}]})

    async def load(self, _: Request) -> Response:
        """As a Diptych router's, below a path of its own: this server is none at its root."""
        workers = [{"role": role, "state": "ready"} for role in ("prefill", "decode", "decode")]
        return JSONResponse({"workers": workers})

    async def metrics(self, _: Request) -> Response:
        """Each reading has 10 more requests that took 1.0 to 1.05 times what was predicted."""
        self.num_readings += 1
        buckets = [(0.95, 0), (1.0, 0), (1.05, 10 * self.num_readings), ("+Inf", 10 * self.num_readings)]
        lines = (f'diptych_ttft_prediction_ratio_bucket{{engine="router",le="{le}"}} {num}' for le, num in buckets)
        return Response("\n".join(lines))

    async def tokenize(self, request: Request) -> Response:
        text = (await request.json())["prompt"]
        return JSONResponse({"tokens": list(text.encode())})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] == "busy":
            return JSONResponse({"error": {"message": "no worker"}}, status_code=503)
        chat = request.url.path.endswith("chat/completions")
        return StreamingResponse(self._events(body, chat), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
        model, count = body["model"], body["max_tokens"]
        if model in ("late", "turns"):
            async with self._turn if model == "turns" else contextlib.nullcontext():
                await asyncio.sleep(0.02)
        if chat:
            yield _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        yield ": keep-alive\n\n"
        for i in range(count):
            if i == 2 and model == "breaks":
                yield _event(error={"message": "worker lost"})
                return
            if i == 2 and model == "cut":
                return
            await asyncio.sleep(0.05 if model == "slow" else 0.001)
            text = {"delta": {"content": "é "}} if chat else {"text": "é "}
            yield _event(choices=[{"index": 0, **text, "finish_reason": "length" if i == count - 1 else None}])
        if model != "silent":
            usage = {"prompt_tokens": 77, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 16}}
            yield _event(choices=[], usage=usage)
            yield "data: [DONE]\n\n"


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


@pytest.fixture(scope="session")
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.stop()
