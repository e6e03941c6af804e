"""Makes one answer, streamed or whole, and ends its generation the moment the client leaves.

    start every choice ─> wait for the first arrival, at most keepalive_s ─> error? a real status
                                                                         └─> 200: opening chunks, text, usage, [DONE]

The status is held back until something has arrived, so that a full or empty service still answers 429 or 503.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from diptych.common.errors import DeadlineExceeded, RequestError
from diptych.router.api.choice import Choice, Piece
from diptych.router.api.errors import CLIENT_CLOSED, error_object, error_response
from diptych.router.api.generations import Arrival, ClientGone, Generations
from diptych.router.api.plan import Plan
from diptych.router.api.service import Service
from diptych.router.api.shape import Object, Shape
from diptych.router.request_log import RequestLog

SEND_GRACE_S = 30.0
"""How much longer than its deadline a request may take to reach a client that reads slowly."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Exchange(Response):
    """The answer to one generation request. It owns the generations from its call to its end."""

    def __init__(self, service: Service, plan: Plan, shape: Shape, log: RequestLog) -> None:
        super().__init__()
        self._service, self._plan, self._shape, self._log = service, plan, shape, log
        fields = plan.fields
        options = fields.stream_options
        self._stream = bool(fields.stream)
        self._usage_at_end = self._stream and options is not None and bool(options.include_usage)
        self._usage_always = self._stream and options is not None and bool(options.continuous_usage_stats)
        self._prompt_token_ids = [
            prompt.token_ids if fields.return_token_ids else None for prompt in plan.prompts
        ]  # None where the client does not want them
        self._head: Object = {
            "id": plan.id,
            "object": shape.chunk_object if self._stream else shape.object,
            "created": plan.created,
            "model": plan.model,
            "system_fingerprint": service.fingerprint,
        }
        log.id, log.model, log.stream, log.choices = plan.id, plan.model, self._stream, plan.choices
        log.num_prompt_tokens = plan.num_prompt_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generations = Generations(self._service.client)
        watcher = asyncio.create_task(_watch(receive, generations), name=f"{self._plan.id}-watch")
        try:
            for choice in self._plan.choices:
                generations.start(choice.index, choice.request)
            async with asyncio.timeout(self._service.config.request_timeout_s + SEND_GRACE_S):
                answer = self._answer_stream if self._stream else self._answer_whole
                await answer(generations, scope, receive, send)
        except ClientGone:
            self._log.client_gone()
        except TimeoutError:
            self._log.fail(DeadlineExceeded("the client took too long to read its answer"))
        except asyncio.CancelledError:  # the server ends
            self._log.client_gone()
            raise
        finally:
            watcher.cancel()
            await generations.close()
            self._settle()
            self._log.end()

    # ------------------------------------------------------------ whole

    async def _answer_whole(self, generations: Generations, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._plan.choices]
        keepalive_s = self._service.config.keepalive_s
        try:
            while not self._finished:
                for choice, piece in self._take(generations, await generations.next(keepalive_s)):
                    pieces[choice.index].append(piece)
        except RequestError as error:
            self._service.hint(error)
            self._log.fail(error)
            await error_response(error)(scope, receive, send)
            return
        choices = [
            self._shape.whole(choice, pieces[choice.index], self._prompt_token_ids[choice.prompt])
            for choice in self._plan.choices
        ]
        body = self._head | {"choices": choices, "usage": self._usage()} | self._envelope()
        response = Response(orjson.dumps(body), media_type="application/json")
        await response(scope, receive, send)

    # ------------------------------------------------------------ streamed

    async def _answer_stream(self, generations: Generations, scope: Scope, receive: Receive, send: Send) -> None:
        keepalive_s = self._service.config.keepalive_s
        arrivals = await generations.next(keepalive_s)
        refused = next((arrival.error for arrival in arrivals if arrival.error is not None), None)
        if refused is not None:
            self._service.hint(refused)
            self._log.fail(refused)
            await error_response(refused)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        opened = False
        while not self._finished:
            chunks: list[bytes] = []
            if arrivals and not opened:
                chunks, opened = self._opening(), True
            try:
                chunks += [self._chunk(choice, piece) for choice, piece in self._take(generations, arrivals)]
            except RequestError as error:
                self._log.fail(error)
                chunks.append(_event(error_object(error)))
                await send(_body(b"".join(chunks), more=False))
                return
            if self._finished:
                await send(_body(b"".join((*chunks, self._ending())), more=False))
                return
            await send(_body(b"".join(chunks) or KEEP_ALIVE, more=True))
            arrivals = await generations.next(keepalive_s)

    def _opening(self) -> list[bytes]:
        """The first chunk of every choice, where the endpoint has such."""
        ids = self._prompt_token_ids
        openings = [self._shape.opening(choice, ids[choice.prompt]) for choice in self._plan.choices]
        events: list[bytes] = []
        extra = self._envelope()
        for opening in filter(None, openings):
            events.append(self._data([opening], extra))
            extra = {}
        return events

    def _chunk(self, choice: Choice, piece: Piece) -> bytes:
        return self._data([self._shape.chunk(choice, piece)])

    def _ending(self) -> bytes:
        return (self._data([], {"usage": self._usage()}) if self._usage_at_end else b"") + DONE

    def _data(self, choices: list[Object], extra: Object | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._usage_always:
            chunk["usage"] = self._usage()
        elif self._usage_at_end:
            chunk["usage"] = None
        if extra:
            chunk |= extra
        return _event(chunk)

    # ------------------------------------------------------------ both

    def _take(self, generations: Generations, arrivals: Sequence[Arrival]) -> list[tuple[Choice, Piece]]:
        """Hands arrivals to their choices. Raises the error that ended one of them."""
        pieces: list[tuple[Choice, Piece]] = []
        for arrival in arrivals:
            choice = self._plan.choices[arrival.index]
            if choice.finish_reason:  # ended by a stop string; what was under way comes too late
                continue
            if arrival.event is None:
                raise arrival.error or RequestError("the answer ended early")
            piece = choice.push(arrival.event)
            self._clock(choice, arrival.at, len(piece.token_ids))
            if choice.finish_reason and not arrival.event.finish_reason:
                generations.stop(arrival.index)
            pieces.append((choice, piece))
        return pieces

    def _clock(self, choice: Choice, at: float, num_tokens: int) -> None:
        """Note when tokens came."""
        if not num_tokens:
            return
        metrics = self._service.metrics
        self._service.gate.spend(self._log.visit, num_tokens)
        if not choice.first_at:
            choice.first_at = at
            metrics.ttft.observe(at - self._log.began)
        else:
            metrics.observe_gap(at - choice.last_at, num_tokens)
        choice.last_at = at

    def _settle(self) -> None:
        """What the end means to others: room for the next one, and tokens given back for a prompt never computed."""
        log = self._log
        if log.status == 200:
            self._service.pace.ended(time.monotonic())
        elif log.status >= 429 and log.status != CLIENT_CLOSED and not log.num_output_tokens:
            self._service.gate.spend(log.visit, -log.num_prompt_tokens)

    @property
    def _finished(self) -> bool:
        return all(choice.finish_reason for choice in self._plan.choices)

    def _envelope(self) -> Object:
        return self._shape.envelope(self._plan.choices[0], self._prompt_token_ids[0])

    def _usage(self) -> Object:
        num_prompt_tokens, num_output_tokens = self._plan.num_prompt_tokens, self._log.num_output_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._log.num_cached_tokens},
        }


async def _watch(receive: Receive, generations: Generations) -> None:
    """The body is read, so the next thing a client can do is to leave."""
    while (await receive())["type"] != "http.disconnect":
        continue
    generations.leave()


def _event(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
