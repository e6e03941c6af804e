"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from router.api.anthropic.answers import AnthropicErrorBody, AnthropicMessage, TokenCount
from router.api.anthropic.fields import CountTokensRequest, MessagesRequest
from router.api.openapi import documented
from router.api.query import json_answer
from router.generation import (
    AnswerChoice,
    AnswerParts,
    AnswerPlan,
    Object,
    Piece,
    RequestContext,
    RequestLog,
    ServedModel,
    arguments_of,
    chat_of,
    conversation_tokens,
    event,
    generation_call,
    key_of,
    plan_translated,
    router_state_of,
    tool_calling,
)
from router.request import MESSAGES_PATH, named_as
from router.request.errors import anthropic_error
from router.text import CallPart, Part, TextPart, ThoughtPart

SIGNATURE = "ZGlwdHljaA=="
"""Signature of all thinking blocks. It proves nothing, but clients do not send back a block without one."""

message_routes = APIRouter()
"""`/v1/messages` and `/v1/messages/count_tokens`."""

STOP_REASONS = {"length": "max_tokens", "abort": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


@message_routes.post(
    MESSAGES_PATH,
    tags=["generate"],
    **documented(MessagesRequest, AnthropicMessage, streams=True, errors=(AnthropicErrorBody,)),
)
async def messages(request: Request) -> Response:
    """Generate the next message of a conversation (Anthropic's Messages API)."""
    async with generation_call(request, MessagesRequest) as (call, fields):
        model, plan = await call.plan(fields, plan_messages)
        return call.answer(model, plan, MessagesSerializer(model, plan, call.log))


@message_routes.post(
    f"{MESSAGES_PATH}/count_tokens",
    tags=["tokens"],
    **documented(CountTokensRequest, TokenCount, errors=(AnthropicErrorBody,)),
)
async def message_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation (Anthropic's Messages API)."""
    router_state = router_state_of(request)
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, CountTokensRequest, lease)
        model = await router_state.models.open(fields.model, key_of(request))
        chat = await chat_of(model, fields.as_chat, is_long=fields.is_long)
        with named_as(fields.names):
            calling = tool_calling(chat)
        functions = calling.functions if calling else ()
        token_ids = await conversation_tokens(model, chat, functions, max_bytes=model.max_tokenize_bytes)
        return json_answer({"input_tokens": len(token_ids)})


async def plan_messages(model: ServedModel, fields: MessagesRequest, context: RequestContext) -> AnswerPlan:
    """Plan the answer to the equivalent chat request. Raises RequestError."""
    return await plan_translated(model, fields, context, fields.as_chat, is_long=fields.is_long)


class MessagesSerializer:
    """Serialises an answer as blocks of thinking, text and tool calls. A stream sends the blocks sequentially."""

    def __init__(self, model: ServedModel, plan: AnswerPlan, log: RequestLog) -> None:
        self._plan, self._log = plan, log
        self._parts = AnswerParts(model, plan.fields)
        self._num_blocks = 0
        self._open = ""  # type of the block that is being streamed, if any

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        (choice,) = self._plan.choices
        content: list[Object] = []
        for kind, parts in groupby(self._parts.whole(choice, pieces[0]), type):
            if kind is TextPart:  # as in a stream, marks between texts do not end a block
                parts = iter([TextPart("".join([part.text for part in parts if isinstance(part, TextPart)]))])
            content += [self._block(choice, part) for part in parts]
        if not content or content[-1]["type"] == "thinking":
            content.append(self._block(choice, TextPart("")))
        return self._message(content) | self._stop(choice) | {"usage": self._usage()}

    def opening(self) -> bytes:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", {"message": message})

    def chunk(self, choice: AnswerChoice, piece: Piece) -> bytes:
        events = [self._add(choice, part) for part in self._parts.split(choice, piece)]
        if piece.finish_reason:
            if self._open in ("", "thinking"):
                events.append(self._begin(self._block(choice, TextPart(""))))
            events.append(self._end_block())
            events.append(_event("message_delta", {"delta": self._stop(choice), "usage": self._usage()}))
        return b"".join(events)

    def ending(self) -> bytes:
        return _event("message_stop", {})

    def error(self, error: RequestError) -> bytes:
        return _event("error", anthropic_error(error))

    # ------------------------------------------------------------ inside

    def _message(self, content: list[Object]) -> Object:
        head = {"id": self._plan.id, "type": "message", "role": "assistant", "model": self._plan.model}
        return {**head, "content": content}

    def _add(self, choice: AnswerChoice, part: Part) -> bytes:
        """Return the events that add a part, in a new block unless it continues the open one."""
        if isinstance(part, CallPart):
            begun = self._begin(self._block(choice, CallPart(part.index, part.name))) if part.name else b""
            added: Object = {"type": "input_json_delta", "partial_json": part.arguments}
            return begun + self._delta(added) if part.arguments else begun
        kind = "text" if isinstance(part, TextPart) else "thinking"
        begun = self._begin(self._block(choice, type(part)(""))) if self._open != kind else b""
        return begun + self._delta({"type": f"{kind}_delta", kind: part.text})

    def _block(self, choice: AnswerChoice, part: Part) -> Object:
        if isinstance(part, ThoughtPart):
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE if part.text else ""}
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        call_id = self._parts.id_of(choice, part.index)
        return {"type": "tool_use", "id": call_id, "name": part.name, "input": arguments_of(part.arguments)}

    def _begin(self, block: Object) -> bytes:
        """Close the open block and open another."""
        ended = self._end_block()
        self._open = str(block["type"])
        self._num_blocks += 1
        return ended + _event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _delta(self, delta: Object) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", {"index": self._num_blocks - 1})

    def _stop(self, choice: AnswerChoice) -> Object:
        reason = self._parts.finish_reason(choice, choice.finish_reason)
        if reason == "stop" and choice.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
        return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}

    def _usage(self) -> Object:
        cached = self._log.num_cached_tokens
        return {
            "input_tokens": self._plan.num_prompt_tokens - cached,
            "output_tokens": self._log.num_output_tokens,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


def _event(kind: str, members: Object) -> bytes:
    return event({"type": kind} | members, kind)
