"""`POST /v1/messages`: conversations in the shape of Anthropic's API, answered by the same means as our own."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from diptych.common.errors import RequestError
from diptych.router.access.keys import ApiKey
from diptych.router.api.anthropic_fields import Conversation, CountTokensRequest, MessagesRequest
from diptych.router.api.chat import conversation_tokens, plan_chat
from diptych.router.api.choice import Choice, Piece
from diptych.router.api.errors import anthropic_error
from diptych.router.api.fields import ChatRequest
from diptych.router.api.parts import AnswerParts
from diptych.router.api.plan import Plan
from diptych.router.api.service import Service
from diptych.router.api.shape import Object
from diptych.router.api.structure import tool_calling
from diptych.router.request_log import RequestLog

MANY_TURNS = 1000
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


async def plan_messages(service: Service, fields: MessagesRequest, key: ApiKey, traceparent: str) -> Plan:
    """Renders and tokenises the conversation. Raises RequestError."""
    return await plan_chat(service, await _chat_of(service, fields), key, traceparent, prefix="msg")


async def count_tokens(service: Service, fields: CountTokensRequest) -> int:
    """How many tokens the prompt of these messages has. Raises RequestError."""
    service.check_model(fields.model)
    chat = await _chat_of(service, fields)
    calling = tool_calling(chat)
    return len(await conversation_tokens(service, chat, calling.functions if calling else ()))


async def _chat_of(service: Service, fields: Conversation) -> ChatRequest:
    """Apart from the event loop where it takes long."""
    few = len(fields.messages) <= MANY_TURNS
    return fields.as_chat() if few else await service.text.apart(fields.as_chat)


class MessagesFrames:
    """A message of blocks: text, and calls of tools. A stream opens, fills and closes them one after the other."""

    def __init__(self, service: Service, fields: MessagesRequest, plan: Plan, log: RequestLog) -> None:
        self._plan, self._log = plan, log
        self._parts = AnswerParts(service, plan.fields)
        self._num_blocks = 0
        self._open = ""  # the type of the last block while more may be added to it

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        (choice,) = self._plan.choices
        apart = [self._parts.taken_apart(choice, piece) for piece in pieces[0]]
        thought, text = "".join([parts.thought for parts in apart]), "".join([parts.text for parts in apart])
        calls = self._parts.whole(choice, [call for parts in apart for call in parts.calls])
        content: list[Object] = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
        if text or not calls:
            content.append({"type": "text", "text": text})
        for call in calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
        return self._message(content) | self._stop(choice) | {"usage": self._usage()}

    def opening(self) -> bytes:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", {"message": message})

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        thought, text, parts = self._parts.taken_apart(choice, piece)
        events: list[bytes] = []
        if thought:
            if self._open != "thinking":
                events.append(self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
            events.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        if text:
            if self._open != "text":
                events.append(self._begin("text", {"type": "text", "text": ""}))
            events.append(self._delta({"type": "text_delta", "text": text}))
        for part in parts:
            if part.name:
                call: Object = {
                    "type": "tool_use",
                    "id": self._parts.id_of(choice, part.index),
                    "name": part.name,
                    "input": {},
                }
                events.append(self._begin("tool_use", call))
            if part.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        if piece.finish_reason:
            if self._open in ("", "thinking"):
                events.append(self._begin("text", {"type": "text", "text": ""}))
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

    def _begin(self, kind: str, block: Object) -> bytes:
        """A new block, behind the one before."""
        ended = self._end_block()
        self._open = kind
        self._num_blocks += 1
        return ended + _event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _delta(self, delta: Object) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", {"index": self._num_blocks - 1})

    def _stop(self, choice: Choice) -> Object:
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


def _input(arguments: str) -> object:
    """Of a call that `max_tokens` cut off, nothing can be read."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}


def _event(kind: str, members: Object) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind} | members) + b"\n\n"
