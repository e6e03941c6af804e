"""The real application on a real socket, in front of a scripted engine with the tiny model's tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI

from common.config import RouterConfig
from common.errors import RequestError
from common.grammar.token_rules import finish_reason
from common.model_files.files import ModelFiles
from common.wire.sampling_params import TokenLogprobs
from router.dispatch.client import ANYONE, Caller, GenerationRequest, RequestTimeline, TokenEvent
from router.dispatch.load import ClassLoad, DispatchLoad, WorkerLoad
from router.generation.models import Models
from router.generation.served_model import ServedModel
from router.generation.tracing import Tracing
from router.observe.metrics import RouterMetrics
from router.server.app import build_app
from router.server.server import Server, listen, server_of
from router.text.text_pipeline import TextPipeline

MODEL = "tiny-random"
EOS = 259
TIMELINE = RequestTimeline("prefill-0", "decode-0", queue_s=0.001, prefill_s=0.02, transfer_s=0.003, decode_s=0.1)
WORKER = WorkerLoad("tcp://127.0.0.1:1", "decode", "decode-0", "ready", 0, 0, 90, 100, 0, 0.0, 0.0, 0, 0, 0)


@dataclass
class Engine:
    """A `GenerationClient` that repeats the given `text`, or tokens of `script`, `per_event` tokens at a time.

    `error` is raised after `error_after` tokens; `hold_after` tokens wait for `go`. While `full`, prompts of at most
    `most_when_full` tokens find room.
    """

    text: str = "The quick brown fox. "
    script: list[int] = field(default_factory=list)
    per_event: int = 1
    error: RequestError | Exception | None = None
    error_after: int = 0
    hold_after: int = -1
    eos_after: int = -1
    cached: int = 0
    is_ready: tuple[bool, str] = (True, "")
    max_model_len: int = 0
    logprob: float = -0.5
    full: RequestError | None = None
    most_when_full: int = -1
    requests: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_resets: int = 0
    num_passed_on: int = 0
    with_logprobs: set[str] = field(default_factory=set)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def check_room(self, is_longer: Callable[[int], bool], caller: Caller = ANYONE) -> None:
        if self.full is not None and (self.most_when_full < 0 or is_longer(self.most_when_full)):
            raise self.full

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        self.requests.append(request)
        done = False
        try:
            async for event in self._events(request):
                done = bool(event.finish_reason)
                if done or request.sink is None or not request.sink(event):
                    yield event
        finally:
            if not done and self.error is None:
                self.aborted.append(request.request_id)

    async def _events(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        script = self.script or list(self.text.encode())
        tokens: list[int] = []
        reason, count = "", 0
        while not reason:
            if count == self.hold_after:
                await self.go.wait()
            if self.error is not None and count >= self.error_after:
                raise self.error
            token = EOS if count == self.eos_after else script[count % len(script)]
            tokens.append(token)
            count += 1
            reason = finish_reason(
                request.params, (EOS,), num_output_tokens=count, token_id=token, num_tokens=count, max_model_len=10**9
            )
            if reason or len(tokens) == self.per_event:
                yield self._event(request, tokens, reason)
                tokens = []
                await asyncio.sleep(0)

    def _event(self, request: GenerationRequest, tokens: list[int], reason: str) -> TokenEvent:
        top = tuple((ord("a") + i, -1.0 - i) for i in range(max(0, request.params.logprobs)))
        logprobs = tuple(TokenLogprobs(self.logprob, top) for _ in tokens) if request.params.logprobs >= 0 else ()
        timeline = msgspec.structs.replace(TIMELINE) if reason else None
        asked, prompt = request.params.prompt_logprobs, ()
        if asked >= 0 and request.request_id not in self.with_logprobs:
            self.with_logprobs.add(request.request_id)
            best = tuple((ord("a") + i, -0.25 - i) for i in range(asked))
            prompt = tuple(TokenLogprobs(-float(token), best) for token in request.prompt_token_ids[1:])
        return TokenEvent(tuple(tokens), logprobs, reason, self.cached, timeline, prompt)

    @property
    def ready(self) -> tuple[bool, str]:
        return self.is_ready

    def load(self) -> DispatchLoad:
        stages, batch = {"queue": 0, "decode": 2}, ClassLoad("batch", num_waiting=3, num_held=2, num_refused=7)
        counts = ({"decode": 3}, {"Unavailable": 1}, {"remote": 4}, 5)
        return DispatchLoad(stages, (WORKER,), *counts, classes=(batch,))

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def passed_on(self) -> None:
        self.num_passed_on += 1


@dataclass
class Running:
    """A listening application."""

    app: FastAPI
    engine: Engine
    url: str
    http: httpx.AsyncClient
    server: Server

    async def completion(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"} | fields)

    async def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await self.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages} | fields)

    async def events(self, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """The payloads of a stream, "[DONE]" as text; the answer must be a well-formed event stream."""
        ask = self.chat if "chat" in path else self.completion
        reply = await ask(stream=True, **fields)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        blocks = reply.text.split("\n\n")
        assert blocks.pop() == ""
        payloads = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
        return [text if text == "[DONE]" else json.loads(text) for text in payloads]

    async def metric(self, line: str) -> float:
        """The value of the sample whose name and labels begin with `line`; 0 when there is none."""
        text = (await self.http.get("/metrics")).text
        return sum(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line))


Start = Callable[..., Awaitable[Running]]


@contextlib.asynccontextmanager
async def applications(files: ModelFiles, text: TextPipeline, response_store: str) -> AsyncIterator[Start]:
    """Starts applications with the settings of a test, and ends them."""
    started: list[tuple[Server, httpx.AsyncClient, Tracing | None]] = []

    async def run(
        engine: Engine | None = None,
        headers: dict[str, str] | None = None,
        pipeline: TextPipeline | None = None,
        application: Callable[[RouterConfig], FastAPI] | None = None,
        **settings: Any,
    ) -> Running:
        """`application` makes one in place of the usual."""
        engine = engine or Engine()
        config = RouterConfig(model=MODEL, **({"response_store": response_store} | settings))
        name = config.served_model_name or files.model_id
        tracing = Tracing.of(config)
        if application is None:
            metrics = RouterMetrics(name, engine.load)
            model = ServedModel(engine, pipeline or text, files, config, metrics)  # type: ignore[arg-type]
            app = build_app(config, Models.of_one(model), metrics, tracing=tracing)
        else:
            app = application(config)
        listener = listen("127.0.0.1", 0)
        server = await listening(app, listener)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, verify=False, timeout=60)
        started.append((server, client, tracing))
        return Running(app, engine, url, client, server)

    yield run
    for server, client, tracing in started:
        await client.aclose()
        server.stop_listening()
        await until(lambda server=server: not server.server_state.connections and not server.server_state.tasks)
        if server.config.app.state.batches is not None:
            await server.config.app.state.batches.close()
        await server.config.app.state.responses.close()
        server.config.app.state.router_state.access.close()
        if tracing is not None:
            tracing.close()


async def listening(app: FastAPI, listener: socket.socket) -> Server:
    """The server without its main loop, whose ticks of 0.1 s would make up most of a test."""
    server = server_of(app)
    await server.startup(sockets=[listener])
    return server


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; fail the test when it never comes true."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (no event tells of a change)
            await asyncio.sleep(0.001)


class Tools:
    """What tests use beside the application; a class, because test modules cannot import this one by name."""

    Engine = Engine
    MODEL = MODEL
    EOS = EOS

    until = staticmethod(until)
