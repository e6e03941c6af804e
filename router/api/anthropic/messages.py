"""`POST /v1/messages`: answers conversations in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import orjson

from common.errors import RequestError
from router.api.anthropic.fields import CountTokensRequest, MessagesRequest
from router.api.openai import chat_of, conversation_tokens
from router.generation import (
    AnswerChoice,
    AnswerParts,
    AnswerPlan,
    Object,
    Piece,
    RequestLog,
    Service,
    event,
    tool_calling,
)
from router.request import named_as
from router.request.errors import anthropic_error
from router.text import CallPart, Part, TextPart, ThoughtPart

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


async def count_tokens(service: Service, fields: CountTokensRequest) -> int:
    """The number of tokens that the prompt of these messages has. Raises RequestError."""
    service.check_model(fields.model)
    chat = await chat_of(service, fields.as_chat, is_long=fields.is_long)
    with named_as(fields.names):
        calling = tool_calling(chat)
    functions = calling.functions if calling else ()
    return len(await conversation_tokens(service, chat, functions, max_bytes=service.max_tokenize_bytes))


class MessagesFrames:
    """A message of blocks: thoughts, text and calls of tools. A stream opens, fills and closes one after the other."""

    def __init__(self, service: Service, fields: MessagesRequest, plan: AnswerPlan, log: RequestLog) -> None:
        self._plan, self._log = plan, log
        self._parts = AnswerParts(service, plan.fields)
        self._num_blocks = 0
        self._open = ""  # the type of the last block until it is closed

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        (choice,) = self._plan.choices
        content: list[Object] = []
        for kind, parts in groupby(self._parts.whole(choice, pieces[0]), type):
            if kind is TextPart:  # marks between texts end no block, as in a stream
                parts = iter([TextPart("".join([part.text for part in parts if isinstance(part, TextPart)]))])
            content += [self._block(choice, part) for part in parts]
        if not content or content[-1]["type"] == "thinking":
            content.append(self._block(choice, TextPart("")))
        return self._message(content) | self._stop(choice) | {"usage": self._usage()}

    def opening(self) -> bytes:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", {"message": message})

    def chunk(self, choice: AnswerChoice, piece: Piece) -> bytes:
        events = [self._add(choice, part) for part in self._parts.taken_apart(choice, piece)]
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
        """Add a part, in a new block unless it continues the open one."""
        if isinstance(part, CallPart):
            begun = self._begin(self._block(choice, CallPart(part.index, part.name))) if part.name else b""
            added: Object = {"type": "input_json_delta", "partial_json": part.arguments}
            return begun + self._delta(added) if part.arguments else begun
        kind = "text" if isinstance(part, TextPart) else "thinking"
        begun = self._begin(self._block(choice, type(part)(""))) if self._open != kind else b""
        return begun + self._delta({"type": f"{kind}_delta", kind: part.text})

    def _block(self, choice: AnswerChoice, part: Part) -> Object:
        if isinstance(part, ThoughtPart):
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        call_id = self._parts.id_of(choice, part.index)
        return {"type": "tool_use", "id": call_id, "name": part.name, "input": _input(part.arguments)}

    def _begin(self, block: Object) -> bytes:
        """Close the open block and begin another."""
        ended = self._end_block()
        self._open = str(block["type"])
        self._num_blocks += 1
        return ended + _event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _delta(self, delta: Object) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", {"index": self._num_blocks - 1})

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


def _input(arguments: str) -> object:
    """The arguments as an object; {} for a call that `max_tokens` cut off."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}


def _event(kind: str, members: Object) -> bytes:
    return event({"type": kind} | members, kind)
