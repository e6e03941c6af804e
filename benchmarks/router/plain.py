"""The floor: a plain Starlette application under uvicorn that streams the same chunks, and does nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.router.steps import ALL, Pace, Steps
from benchmarks.router.tally import Tally

MOST_S = 0.05
DONE = b"data: [DONE]\n\n"


class Plain:
    """Streams by id; a ticker puts a token into the queue of each."""

    def __init__(self, pipe: Connection, tally: Tally, token: str) -> None:
        self._pipe, self._steps, self._token = pipe, Steps(1, tally), token
        self._queues: dict[str, asyncio.Queue[bool]] = {}
        self._times: dict[str, list[float]] = {}
        self._numbers = itertools.count()
        self._end = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Until the benchmark says "end"."""
        route = Route("/v1/chat/completions", self._answer, methods=["POST"])
        config = uvicorn.Config(Starlette(routes=[route]), log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._obey)
        os.set_blocking(self._pipe.fileno(), True)  # uvloop has changed it
        serving = asyncio.create_task(server.serve([listener]))
        ticking = asyncio.create_task(self._tick())
        await self._end.wait()
        ticking.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, ticking, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            if self._steps.due(now, len(self._queues)) is not None:
                self._step(self._steps.part)
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(self._steps.wait_s(now, len(self._queues), MOST_S))

    def _step(self, part: slice = ALL, *, last: bool = False) -> None:
        now, queues = time.monotonic(), list(self._queues.items())[part]
        self._steps.num_emitted += len(queues)
        for name, queue in queues:
            queue.put_nowait(last)
            self._times[name].append(now)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        name = f"chatcmpl-{next(self._numbers):032x}"
        if not body.get("stream"):
            count = body["max_tokens"]
            self._steps.num_emitted += count
            message = {"role": "assistant", "content": self._token * count}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
            return JSONResponse(self._head(name) | {"choices": [choice]})
        return StreamingResponse(self._stream(name), media_type="text/event-stream")

    def _head(self, name: str) -> dict[str, Any]:
        head = {"id": name, "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "plain"}
        return head | {"system_fingerprint": "fp_0123456789abcdef"}

    async def _stream(self, name: str) -> AsyncIterator[bytes]:
        queue = self._queues[name] = asyncio.Queue()
        delta = {"index": 0, "delta": {"content": self._token}, "logprobs": None, "finish_reason": None}
        chunk = f"data: {json.dumps(self._head(name) | {'choices': [delta]}, separators=(',', ':'))}\n\n".encode()
        self._times[name] = [time.monotonic()]
        self._steps.num_emitted += 1
        try:
            yield chunk
            while not await queue.get():
                yield chunk
            yield chunk
            yield DONE
        finally:
            self._queues.pop(name, None)
            self._times.pop(name, None)

    def _obey(self) -> None:
        command, *values = self._pipe.recv()
        answer: Any = None
        match command:
            case "pace":
                self._steps.set(Pace(values[0]), values[1], time.monotonic(), values[2])
            case "finish":
                self._steps.set(Pace.HOLD, 0.0, 0.0)
                self._step(last=True)
            case "times":
                answer = {f"{name}-0": list(times) for name, times in self._times.items()}
            case "report":
                num_emitted, num_running = self._steps.num_emitted, len(self._queues)
                answer = {"num_emitted": num_emitted, "num_running": num_running, "longest_prompt": 0}
            case "end":
                self._end.set()
        self._pipe.send(answer)


def serve(pipe: Connection, tally: Tally, token: str, backlog: int) -> None:
    """Body of the process: sends its port, then obeys."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
    pipe.send(listener.getsockname()[1])
    uvloop.run(Plain(pipe, tally, token).run(listener))
