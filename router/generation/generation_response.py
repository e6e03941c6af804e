"""The response to one generation request, streamed or complete. Aborts the generation when the client disconnects.

    start every choice ─> wait for the first event, at most keepalive_s ─> error? its own status
                                                                       └─> 200: opening chunks, text, usage, [DONE]

The status is sent only after the first event, so that a router without capacity or workers can still answer 429 or 503.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import DeadlineExceeded, RequestError, Unavailable
from router.dispatch import FIRST_WEIGHTS, TokenEvent, TokenSource
from router.generation.answer_serializer import AnswerSerializer
from router.generation.answer_writer import AnswerWriter, answer_writer_of
from router.generation.beam_search import BeamClient
from router.generation.choice import AnswerChoice, Piece
from router.generation.generations import Arrival, ClientGone, Generations, LimitedClient
from router.generation.plan import AnswerPlan
from router.generation.request_log import RequestLog
from router.generation.router_state import RouterState
from router.generation.served_model import ServedModel
from router.request import BodyLease
from router.request.errors import CLIENT_CLOSED, error_response

SEND_GRACE_S = 30.0
"""Additional time, in seconds after its deadline, for a request whose client reads slowly."""
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """Format of a stream: its content type, and the bytes that keep an idle stream open without changing it."""

    content_type: bytes = b"text/event-stream; charset=utf-8"
    keep_alive: bytes = KEEP_ALIVE

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", self.content_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


EVENT_STREAM = StreamFormat()
STREAM_HEADERS = EVENT_STREAM.headers
# Larger answers take milliseconds to write, so a thread writes them. An answer can have millions of tokens.
MANY_LOGPROBS, MANY_TOKENS = 2000, 20_000
MANY_PIECES = 64
"""AnswerWriter of one stream that are written before yielding to other tasks."""


class GenerationResponse(Response):
    """Response to one generation request. Owns the request's generations while it is sent.

    Also owns `lease`, the memory of the request's body. `before_end` is awaited after the end of the answer is known
    and before it is sent. `stream_format` is that of a streamed answer.
    """

    def __init__(
        self,
        router_state: RouterState,
        model: ServedModel,
        plan: AnswerPlan,
        serializer: AnswerSerializer,
        log: RequestLog,
        lease: BodyLease,
        before_end: Callable[[], Awaitable[None]] | None = None,
        stream_format: StreamFormat = EVENT_STREAM,
    ) -> None:
        super().__init__()
        self._format = stream_format
        self._router_state, self._model = router_state, model
        self._plan, self._serializer, self._log = plan, serializer, log
        self._lease, self._before_end = lease, before_end
        self._stream = bool(plan.fields.stream)
        self._generations: Generations | None = None
        self._writer: AnswerWriter | None = None
        self._next_comment = 0.0
        self._num_spent = 0
        log.id, log.model, log.choices = plan.id, plan.model, plan.choices
        log.num_prompt_tokens = plan.num_prompt_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            held.callback(self._lease.release)
            try:
                held.enter_context(self._router_state.prompt_logprobs.lease(self._plan.num_prompt_logprobs_held))
            except Unavailable as error:
                await self._refuse(error, scope, receive, send)
                self._settle()
                self._log.end()
                return
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        generations = self._generations = Generations(self._source(), self._router_state.unread)
        writer, watcher = answer_writer_of(scope), None
        if writer is None:
            watcher = asyncio.create_task(_watch(receive, generations), name=f"{self._plan.id}-watch")
        else:
            writer.watch(generations.leave)
        try:
            async with asyncio.timeout(self._router_state.config.request_timeout_s + SEND_GRACE_S):
                await generations.start([choice.request for choice in self._plan.choices])
                answer = self._answer_stream if self._stream else self._answer_whole
                await answer(generations, scope, receive, send)
        except ClientGone:
            self._log.client_gone()
        except TimeoutError:
            self._log.fail(DeadlineExceeded("The client did not read its answer in time."))
        except asyncio.CancelledError:  # the server is shutting down
            self._log.client_gone()
            raise
        finally:
            if watcher is not None:
                watcher.cancel()
            if writer is not None:
                writer.unwatch()
            await generations.close()
            self._settle()
            self._log.end()

    def _source(self) -> TokenSource:
        client, plan = self._model.client, self._plan
        if plan.beams is not None:
            return BeamClient(client, plan.beams, self._spend)
        return LimitedClient(client, plan.most_at_once) if plan.most_at_once else client

    # ------------------------------------------------------------ whole

    async def _answer_whole(self, generations: Generations, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._plan.choices]
        keepalive_s = self._router_state.config.keepalive_s
        try:
            generations.sink = partial(self._keep, pieces)
            while not self._finished:
                for choice, piece in self._take(generations, await generations.next(keepalive_s)):
                    pieces[choice.index].append(piece)
            self._note_weights({choice.weight_version for choice in self._plan.choices})
            body = await self._made(lambda: orjson.dumps(self._serializer.whole(pieces)), self._log.num_output_tokens)
        except RequestError as error:
            await self._refuse(error, scope, receive, send)
            return
        if self._before_end is not None:
            await self._before_end()
        response = Response(body, media_type="application/json")
        await response(scope, receive, send)

    def _keep(self, pieces: Sequence[list[Piece]], index: int, at: float, event: TokenEvent) -> bool:
        """Implement `ChoiceSink`: process a mid-answer event immediately."""
        choice = self._plan.choices[index]
        if event.logprobs or not self._is_middle(choice, event):
            return False
        if not choice.finish_reason:
            pieces[index].append(self._pushed(choice, at, event))
        return True

    # ------------------------------------------------------------ streamed

    async def _answer_stream(self, generations: Generations, scope: Scope, receive: Receive, send: Send) -> None:
        keepalive_s, serializer = self._router_state.config.keepalive_s, self._serializer
        arrivals = await generations.next(keepalive_s)
        refused = next((arrival.error for arrival in arrivals if arrival.error is not None), None)
        if refused is not None:
            await self._refuse(refused, scope, receive, send)
            return
        self._note_weights({arrival.event.weight_version for arrival in arrivals if arrival.event is not None})
        await send({"type": "http.response.start", "status": 200, "headers": self._format.headers})
        opened = False
        # A token without text, such as part of a character, counts as activity: it needs no keep-alive comment.
        self._next_comment = time.perf_counter() + (keepalive_s if arrivals else 0.0)
        self._writer = answer_writer_of(scope)
        if self._writer is not None:
            self._writer.comment = self._format.keep_alive
        while True:
            chunks: list[bytes] = []
            if arrivals and not opened:
                if not self._log.client_request.weight_version:  # nothing had arrived before the headers
                    self._note_weights({each.event.weight_version for each in arrivals if each.event is not None})
                chunks, opened = [serializer.opening()], True
            try:
                for number, (choice, piece) in enumerate(self._take(generations, arrivals), 1):
                    make = partial(serializer.chunk, choice, piece)
                    chunks.append(await self._made(make, len(piece.token_ids), first=piece.first))
                    if number % MANY_PIECES == 0:
                        await asyncio.sleep(0)
            except RequestError as error:
                self._log.fail(error)
                chunks.append(serializer.error(error))
                await self._send_end(chunks, send)
                return
            if self._finished:
                chunks.append(serializer.ending())
                await self._send_end(chunks, send)
                return
            data = b"".join(chunks)
            if data or time.perf_counter() >= self._next_comment:
                await send(_body(data or self._format.keep_alive, more=True))
                self._next_comment = time.perf_counter() + keepalive_s
            if opened and self._writer is not None:
                generations.sink = self._pass_on
            arrivals = await generations.next(self._next_comment - time.perf_counter())

    async def _send_end(self, chunks: Sequence[bytes], send: Send) -> None:
        if self._before_end is not None:
            await self._before_end()
        await send(_body(b"".join(chunks), more=False))

    def _pass_on(self, index: int, at: float, event: TokenEvent) -> bool:
        """Implement `ChoiceSink`: write a mid-stream event immediately.

        Only events with log-probabilities count towards the turn budget.
        """
        choice, writer = self._plan.choices[index], self._writer
        if writer is None or not writer.ready or not self._is_middle(choice, event):
            return False
        if not event.logprobs:
            self._write(writer, choice, at, event)
        elif (budget := self._router_state.logprob_time).has_time:
            budget.run_now(partial(self._write, writer, choice, at, event))
        else:
            return False
        return True

    def _write(self, writer: AnswerWriter, choice: AnswerChoice, at: float, event: TokenEvent) -> None:
        if not choice.finish_reason and (data := self._serializer.chunk(choice, self._pushed(choice, at, event))):
            writer.write(data)
            self._next_comment = at + self._router_state.config.keepalive_s

    # ------------------------------------------------------------ both

    def _note_weights(self, versions: Collection[str]) -> None:
        """Record the versions of the weights. Several choices may have different ones during an update."""
        self._log.client_request.weight_version = ",".join(sorted({one or FIRST_WEIGHTS for one in versions}))

    def _is_middle(self, choice: AnswerChoice, event: TokenEvent) -> bool:
        """Whether an event is in the middle of a choice and small enough to be converted to text immediately."""
        return not (not choice.num_pieces or event.finish_reason or self._is_many(len(event.token_ids), first=False))

    def _pushed(self, choice: AnswerChoice, at: float, event: TokenEvent) -> Piece:
        """Push an event from a sink to its choice. Stops the generation if a stop string ends the choice."""
        piece = choice.push(event)
        self._measure(choice, at, len(piece.token_ids))
        if choice.finish_reason and self._generations is not None:
            self._generations.stop(choice.index)
            self._generations.wake()
        return piece

    async def _made(self, write: Callable[[], bytes], num_tokens: int, *, first: bool = True) -> bytes:
        """Return the bytes that `write` makes of `num_tokens` tokens. Raises Unavailable.

        Large answers are written in a thread; log-probabilities wait for an event loop iteration with time left. The
        `first` bytes of an answer also contain the log-probabilities of its prompts.
        """
        if self._is_many(num_tokens, first=first):
            return await self._model.text.apart(write)
        return write() if self._plan.num_logprobs < 0 else await self._router_state.logprob_time.run(write)

    def _is_many(self, num_tokens: int, *, first: bool) -> bool:
        plan = self._plan
        num_logprobs = plan.num_prompt_logprobs_held if first else 0
        num_logprobs += num_tokens * (1 + plan.num_logprobs) + plan.num_values  # none for -1
        return num_logprobs > MANY_LOGPROBS or num_tokens > MANY_TOKENS

    async def _refuse(self, error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        self._router_state.add_retry_after(error)
        self._log.fail(error)
        await error_response(error)(scope, receive, send)

    def _take(self, generations: Generations, arrivals: Sequence[Arrival]) -> Iterator[tuple[AnswerChoice, Piece]]:
        """Yield each arrival's choice and piece. Raises the error that ended a choice."""
        for arrival in arrivals:
            choice = self._plan.choices[arrival.index]
            if choice.finish_reason:  # ended by a stop string; ignore tokens that arrive afterwards
                continue
            if arrival.event is None:
                raise arrival.error or RequestError("The answer ended unexpectedly.")
            piece = choice.push(arrival.event)
            self._measure(choice, arrival.at, len(piece.token_ids))
            if choice.finish_reason and not arrival.event.finish_reason:
                generations.stop(arrival.index)
            yield choice, piece

    def _measure(self, choice: AnswerChoice, at: float, num_tokens: int) -> None:
        """Count tokens that arrived at `at`, and the time since the previous ones."""
        if not num_tokens:
            if choice.pooled:
                choice.first_at = choice.last_at = at
            return
        metrics = self._model.metrics
        if self._plan.beams is None:  # a beam search spends the tokens of all its beams
            self._spend(num_tokens)
        if not choice.first_at:
            choice.first_at = at
            metrics.observe_first(at - self._log.client_request.began, num_tokens)
        else:
            metrics.observe_gap(at - choice.last_at, num_tokens)
        choice.last_at = at

    def _spend(self, num_tokens: int) -> None:
        """Count tokens that workers have generated against the key's limits."""
        self._num_spent += num_tokens
        self._router_state.access.spend(self._log.client_request, num_tokens)

    def _settle(self) -> None:
        """Update the router's request rate, or refund the key's prompt tokens if the prompt was not computed."""
        log = self._log
        if log.status == 200:
            self._router_state.completion_rate.ended(time.monotonic())
        elif log.status >= 429 and log.status != CLIENT_CLOSED and not self._num_spent:
            self._router_state.access.spend(log.client_request, -log.num_prompt_tokens)

    @property
    def _finished(self) -> bool:
        return all(choice.finish_reason for choice in self._plan.choices)


async def _watch(receive: Receive, generations: Generations) -> None:
    """Wait until the client disconnects. Its body has been read, so no other message can arrive."""
    while (await receive())["type"] != "http.disconnect":
        continue
    generations.leave()


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
