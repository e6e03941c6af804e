"""Ollama's endpoints for generation and embeddings: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import orjson
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from router.api.embeddings import EmbeddingRequest, EmbeddingSerializer, plan_embeddings
from router.api.ollama.answers import (
    OllamaChatAnswer,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaGenerateAnswer,
)
from router.api.ollama.fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from router.api.openapi import documented
from router.api.query import json_answer
from router.generation import (
    AnswerChoice,
    AnswerParts,
    AnswerPlan,
    GenerationCall,
    Object,
    Piece,
    RequestContext,
    RequestLog,
    ServedModel,
    StreamFormat,
    arguments_of,
    generation_call,
    plan_completion,
    plan_translated,
)
from router.request import (
    OLLAMA_CHAT_PATH,
    OLLAMA_EMBED_PATH,
    OLLAMA_EMBEDDINGS_PATH,
    OLLAMA_GENERATE_PATH,
    named_as,
)
from router.request.errors import invalid_translation, ollama_error
from router.request.fields import ChatRequest
from router.text import CallPart, Part, TextPart, ThoughtPart

CONTENT_TYPE = b"application/x-ndjson"
NS = 1_000_000_000

F = TypeVar("F", OllamaChatRequest, OllamaGenerateRequest)
Plan = Callable[[ServedModel, F, RequestContext], Awaitable[AnswerPlan]]

ollama_generate_routes = APIRouter(tags=["generate"])
"""`/api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings`."""


@ollama_generate_routes.post(
    OLLAMA_CHAT_PATH, **documented(OllamaChatRequest, OllamaChatAnswer, lines=True, errors=(OllamaError,))
)
async def ollama_chat(request: Request) -> Response:
    """Generate the next message of a conversation (Ollama's API). Streams JSON lines unless `stream` is false."""
    return await _answer(request, OllamaChatRequest, plan_ollama_chat, ChatLines)


@ollama_generate_routes.post(
    OLLAMA_GENERATE_PATH, **documented(OllamaGenerateRequest, OllamaGenerateAnswer, lines=True, errors=(OllamaError,))
)
async def ollama_generate(request: Request) -> Response:
    """Generate the answer to a prompt (Ollama's API). Streams JSON lines unless `stream` is false."""
    return await _answer(request, OllamaGenerateRequest, plan_ollama_generate, TextLines)


@ollama_generate_routes.post(
    OLLAMA_EMBED_PATH, **documented(OllamaEmbedRequest, OllamaEmbeddings, errors=(OllamaError,))
)
async def ollama_embed(request: Request) -> Response:
    """Create an embedding for each input (Ollama's API)."""
    async with generation_call(request, OllamaEmbedRequest) as (call, fields):
        model, plan = await call.plan(fields, plan_ollama_embeddings, "embed", keep_s=fields.keep_alive)
        return call.answer(model, plan, EmbedSerializer(model, fields.as_embedding, plan, call.log))


@ollama_generate_routes.post(
    OLLAMA_EMBEDDINGS_PATH, **documented(OllamaEmbeddingsRequest, OllamaEmbedding, errors=(OllamaError,))
)
async def ollama_embeddings(request: Request) -> Response:
    """Create the embedding of a prompt (the former path of Ollama's API)."""
    async with generation_call(request, OllamaEmbeddingsRequest) as (call, fields):
        model, plan = await call.plan(fields, plan_ollama_embeddings, "embed", keep_s=fields.keep_alive)
        return call.answer(model, plan, EmbedSerializer(model, fields.as_embedding, plan, call.log, is_single=True))


async def plan_ollama_chat(model: ServedModel, fields: OllamaChatRequest, context: RequestContext) -> AnswerPlan:
    """Plan the answer to the equivalent chat request. Raises RequestError."""
    return await plan_translated(model, fields, context, fields.as_chat, is_long=fields.is_long)


async def plan_ollama_generate(
    model: ServedModel, fields: OllamaGenerateRequest, context: RequestContext
) -> AnswerPlan:
    """Plan the answer to a chat with one message, or to the bare prompt. Raises RequestError.

    A prompt is bare with `raw` or `suffix`, and for a model without a chat template.
    """
    if not (fields.raw or fields.suffix or model.text.chat_template is None):
        return await plan_translated(model, fields, context, fields.as_chat, is_long=fields.is_long)
    try:
        completion = fields.as_completion()
    except ValidationError as error:
        raise invalid_translation(error) from error
    with named_as(fields.names):
        return await plan_completion(model, completion, context, prefix=fields.id_prefix, default=None)


async def plan_ollama_embeddings(
    model: ServedModel, fields: OllamaEmbedRequest | OllamaEmbeddingsRequest, context: RequestContext
) -> AnswerPlan:
    """Plan the embeddings of the equivalent request. Raises RequestError."""
    return await plan_embeddings(model, fields.as_embedding, context)


async def _answer(request: Request, kind: type[F], plan: Plan[F], lines: type[Lines]) -> Response:
    """Generate the answer to a request, or load or unload its model if it has no prompt."""
    async with generation_call(request, kind) as (call, fields):
        if not fields.has_prompt:
            return await _loaded(call, fields, lines)
        model, planned = await call.plan(fields, plan, keep_s=fields.keep_alive)
        serializer = lines(model, planned, call.log)
        stream_format = StreamFormat(CONTENT_TYPE, serializer.keep_alive)
        return call.answer(model, planned, serializer, stream_format=stream_format)


async def _loaded(
    call: GenerationCall, fields: OllamaChatRequest | OllamaGenerateRequest, lines: type[Lines]
) -> Response:
    """Load or unload a model on demand, for a request without a prompt. Raises ModelNotFound and Unavailable."""
    models, key = call.router_state.models, call.client_request.key
    if fields.unloads:
        name = await models.unload(fields.model, key)
    else:
        call.log.release_model = await models.use(fields.model, key, keep_s=fields.keep_alive)
        name = (await models.open(fields.model, key)).name
    call.lease.release()
    call.log.end()
    reason = "unload" if fields.unloads else "load"
    return json_answer(
        {"model": fields.model or name, "created_at": _now(), **lines.empty, "done": True} | {"done_reason": reason}
    )


class Lines(ABC):
    """Serialises an answer as JSON lines. The last line has the reason of the end, and the numbers."""

    empty: Object

    def __init__(self, model: ServedModel, plan: AnswerPlan, log: RequestLog) -> None:
        self._plan, self._log = plan, log
        self._parts = AnswerParts(model, plan.fields) if isinstance(plan.fields, ChatRequest) else None
        self._calls: dict[int, CallPart] = {}

    @property
    def keep_alive(self) -> bytes:
        """A line that adds nothing."""
        return self._line(self.empty)

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        (choice,) = self._plan.choices
        parts = [part for piece in pieces[0] for part in self._split(choice, piece)]
        return self._body(self._members(choice, parts)) | self._end()

    def opening(self) -> bytes:
        return b""

    def chunk(self, choice: AnswerChoice, piece: Piece) -> bytes:
        """Return a line with the parts that are complete: a tool call is sent when its arguments are."""
        parts = self._split(choice, piece)
        return self._line(self._members(choice, parts)) if parts else b""

    def ending(self) -> bytes:
        return orjson.dumps(self._body(self.empty) | self._end()) + b"\n"

    def error(self, error: RequestError) -> bytes:
        return orjson.dumps(ollama_error(error)) + b"\n"

    @abstractmethod
    def _members(self, choice: AnswerChoice, parts: Sequence[Part]) -> Object:
        """Return the members of a line with these parts."""

    def _split(self, choice: AnswerChoice, piece: Piece) -> list[Part]:
        if self._parts is None:
            return [TextPart(piece.text)] if piece.text else []
        found: list[Part] = []
        for part in self._parts.split(choice, piece):
            if not isinstance(part, CallPart):
                found.append(part)
                continue
            if part.index not in self._calls:
                found += self._complete()
            before = self._calls.get(part.index, CallPart(part.index, ""))
            self._calls[part.index] = CallPart(part.index, before.name + part.name, before.arguments + part.arguments)
        return [*found, *(self._complete() if piece.finish_reason else ())]

    def _complete(self) -> list[CallPart]:
        """Return the calls that no further part continues."""
        calls = list(self._calls.values())
        self._calls.clear()
        return calls

    def _call(self, choice: AnswerChoice, part: CallPart) -> Object:
        assert self._parts is not None
        function = {"index": part.index, "name": part.name, "arguments": arguments_of(part.arguments)}
        return {"id": self._parts.id_of(choice, part.index), "function": function}

    def _line(self, members: Object) -> bytes:
        return orjson.dumps(self._body(members) | {"done": False}) + b"\n"

    def _body(self, members: Object) -> Object:
        return {"model": self._plan.model, "created_at": _now(), **members}

    def _end(self) -> Object:
        (choice,) = self._plan.choices
        return {"done": True, "done_reason": "stop" if choice.finish_reason == "stop" else "length"} | self._numbers(
            choice
        )

    def _numbers(self, choice: AnswerChoice) -> Object:
        began, now = self._log.client_request.began, time.perf_counter()
        first = choice.first_at or now
        return {
            "total_duration": round((now - began) * NS),
            "load_duration": 0,
            "prompt_eval_count": self._plan.num_prompt_tokens,
            "prompt_eval_duration": round((first - began) * NS),
            "eval_count": self._log.num_output_tokens,
            "eval_duration": round(((choice.last_at or first) - first) * NS),
        }


class ChatLines(Lines):
    """Lines of `/api/chat`."""

    empty: Object = {"message": {"role": "assistant", "content": ""}}

    def _members(self, choice: AnswerChoice, parts: Sequence[Part]) -> Object:
        thought, text = _texts(parts)
        message: Object = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls := [self._call(choice, part) for part in parts if isinstance(part, CallPart)]:
            message["tool_calls"] = calls
        return {"message": message}


class TextLines(Lines):
    """Lines of `/api/generate`."""

    empty: Object = {"response": ""}

    def _members(self, choice: AnswerChoice, parts: Sequence[Part]) -> Object:
        thought, text = _texts(parts)
        return {"response": text, "thinking": thought} if thought else {"response": text}


class EmbedSerializer(EmbeddingSerializer):
    """Serialises embeddings as lists of numbers, or with `is_single` the only one."""

    def __init__(
        self,
        model: ServedModel,
        fields: EmbeddingRequest,
        plan: AnswerPlan,
        log: RequestLog,
        *,
        is_single: bool = False,
    ) -> None:
        super().__init__(model, fields, plan)
        self._log, self._is_single = log, is_single

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        vectors = [self._shown(choice.pooled) for choice in self.plan.choices]
        if self._is_single:
            return {"embedding": vectors[0]}
        took_s = time.perf_counter() - self._log.client_request.began
        numbers = {"total_duration": round(took_s * NS), "load_duration": 0}
        return {
            "model": self.plan.model,
            "embeddings": vectors,
            **numbers,
            "prompt_eval_count": self.plan.num_prompt_tokens,
        }


def _texts(parts: Sequence[Part]) -> tuple[str, str]:
    """Return the thought and the text of the parts."""
    thought = "".join([part.text for part in parts if isinstance(part, ThoughtPart)])
    return thought, "".join([part.text for part in parts if isinstance(part, TextPart)])


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
