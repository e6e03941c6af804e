"""Serialisation of responses, complete or as events, in the format of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from common.errors import RequestError
from router.api.openai import merged
from router.api.responses.fields import ResponsesRequest
from router.generation import (
    AnswerChoice,
    AnswerParts,
    AnswerPlan,
    LogprobFormatter,
    Object,
    Piece,
    RequestLog,
    ServedModel,
    TokenWithLogprobs,
    event,
)
from router.stored import IN_PROGRESS, QUEUED
from router.text import CallPart, Part, TextPart, ThoughtPart

ID_PREFIX = "resp_"
CUT = ("length", "abort")
"""Finish reasons of incomplete answers."""
FULL = ("completed", "incomplete")
"""Statuses of responses that ended normally or at their token limit."""
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponsesSerializer:
    """Serialises a response as items: reasoning, messages and function calls. A stream sends the items sequentially.

    `keep` is called with the response whenever its status changes after the first event. Background responses get
    their first events from `queued`.
    """

    def __init__(
        self,
        model: ServedModel,
        fields: ResponsesRequest,
        plan: AnswerPlan,
        log: RequestLog,
        keep: Callable[[Object], None] = lambda response: None,
        *,
        stored: bool = False,
    ) -> None:
        self._fields, self._plan, self._log, self._keep, self._stored = fields, plan, log, keep, stored
        self._parts = AnswerParts(model, plan.fields)
        self._logprobs = LogprobFormatter(model.text, fields.top_logprobs or 0) if fields.wants_logprobs else None
        self._items: list[Object] = []
        self._text: list[str] = []
        self._arguments: list[str] = []
        self._sent_logprobs: list[object] = []
        self._waiting: list[TokenWithLogprobs] = []  # tokens whose text has not arrived yet
        self._text_start = self._text_end = 0  # character range of the last text in the answer
        self._open = ""  # type of the item that is being streamed, if any
        self._num_events = 0

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        (choice,) = self._plan.choices
        self.chunk(choice, merged(choice, pieces[0]))  # only collects the items; the events are dropped
        return self._ended(choice)

    def queued(self) -> bytes:
        """Return the events of a queued background response. `opening` follows when generation begins."""
        waiting: Object = {"response": self.response(QUEUED)}
        return self._event("response.created", waiting) + self._event("response.queued", waiting)

    def opening(self) -> bytes:
        begun = self.response(IN_PROGRESS)
        created = b"" if self._fields.background else self._event("response.created", {"response": begun})
        self._keep(begun)
        return created + self._event("response.in_progress", {"response": begun})

    def chunk(self, choice: AnswerChoice, piece: Piece) -> bytes:
        if self._logprobs is not None:
            self._waiting += piece.with_logprobs
        events = [self._add(choice, part) for part in self._parts.split(choice, piece)]
        if piece.finish_reason:
            cut = piece.finish_reason in CUT and not (self._in_call and self._parts.calls_are_whole(choice))
            if not self._items or (self._open == "reasoning" and not cut):  # clients expect a message
                events.append(self._begin_message())
            events.append(self._end_item("incomplete" if cut else "completed"))
        return b"".join(events)

    def ending(self) -> bytes:
        response = self._ended(self._plan.choices[0])
        return self._event(f"response.{response['status']}", {"response": response})

    def error(self, error: RequestError) -> bytes:
        code = ERROR_CODES.get(error.status, "server_error")
        return self._failed("failed", {"code": code, "message": error.message})

    def cancelled(self, reason: str) -> bytes:
        """Return the last event of a cancelled response. Without a `reason`, its client has cancelled it.

        OpenAI's API has no such event, so `response.failed` carries the cancelled response.
        """
        return self._failed("cancelled", {"code": "server_error", "message": reason} if reason else None)

    def response(self, status: str, output: Sequence[Object] = ()) -> Object:
        """Return the response with the settings of its request."""
        fields, is_full = self._fields, status in FULL
        wanted = fields.text.format if fields.text is not None else None
        reasoning = fields.reasoning
        return {
            "id": self._plan.id,
            "object": "response",
            "created_at": self._plan.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(fields.background),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self._plan.model,
            "output": [*output],
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id or None,
            "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
            "store": self._stored,
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
            "tool_choice": _shown_choice(fields),
            "tools": [tool.model_dump() for tool in fields.tools or () if tool.type not in fields.ignored_tools],
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_full else None,
            "user": fields.user,
            "metadata": fields.metadata or {},
        }

    # ------------------------------------------------------------ items

    def _add(self, choice: AnswerChoice, part: Part) -> bytes:
        if isinstance(part, ThoughtPart):
            return self._think(part)
        return self._say(part) if isinstance(part, TextPart) else self._add_call(choice, part)

    def _think(self, part: ThoughtPart) -> bytes:
        begun = b""
        if self._open != "reasoning":
            begun = self._begin({"type": "reasoning", "id": self._id("rs"), "summary": [], "content": []})
            self._text = []
            begun += self._event("response.content_part.added", self._of_part() | {"part": self._reasoning_text()})
        self._text.append(part.text)
        return begun + self._event("response.reasoning_text.delta", self._of_part() | {"delta": part.text})

    def _say(self, part: TextPart) -> bytes:
        begun = self._begin_message() if self._open != "message" else b""
        logprobs = self._logprobs_of(part)
        self._text.append(part.text)
        self._sent_logprobs += logprobs
        added = {"delta": part.text, "logprobs": logprobs}
        return begun + self._event("response.output_text.delta", self._of_part() | added)

    def _begin_message(self) -> bytes:
        begun = self._begin({"type": "message", "id": self._id("msg"), "role": "assistant", "content": []})
        self._text, self._sent_logprobs = [], []
        self._text_start = self._text_end = 0
        return begun + self._event("response.content_part.added", self._of_part() | {"part": self._output_text()})

    def _add_call(self, choice: AnswerChoice, part: CallPart) -> bytes:
        begun = b""
        if part.name:
            call_id = self._parts.id_of(choice, part.index)
            namespace, name = self._fields.functions.place(part.name)
            call: Object = {"type": "function_call", "id": self._id("fc"), "call_id": call_id, "name": name}
            begun = self._begin(call | ({"namespace": namespace} if namespace else {}) | {"arguments": ""})
            self._arguments = []
        if not part.arguments:
            return begun
        self._arguments.append(part.arguments)
        added = self._of_item() | {"delta": part.arguments}
        return begun + self._event("response.function_call_arguments.delta", added)

    def _begin(self, item: Object) -> bytes:
        """Close the open item and open another."""
        ended = self._end_item()
        self._items.append(item | {"status": IN_PROGRESS})
        self._open = str(item["type"])
        return ended + self._item_event("response.output_item.added")

    def _end_item(self, status: str = "completed") -> bytes:
        if not self._open:
            return b""
        item, kind = self._items[-1], self._open
        rest = self._rest_of_logprobs() if kind == "message" else b""
        self._open = ""
        if kind == "function_call":
            item |= {"arguments": "".join(self._arguments)}
            called = self._of_item() | {"name": item["name"], "arguments": item["arguments"]}
            ended = self._event("response.function_call_arguments.done", called)
        else:
            part = self._output_text() if kind == "message" else self._reasoning_text()
            item |= {"content": [part]}
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            done = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            ended = self._event(done, self._of_part() | said)
            ended += self._event("response.content_part.done", self._of_part() | {"part": part})
        item["status"] = status
        return rest + ended + self._item_event("response.output_item.done")

    # ------------------------------------------------------------ inside

    def _ended(self, choice: AnswerChoice) -> Object:
        response = self.response("incomplete" if choice.finish_reason in CUT else "completed", self._items)
        self._keep(response)
        return response

    def _failed(self, status: str, error: Object | None) -> bytes:
        whole_items = [item for item in self._items if item["status"] == "completed"]
        response = self.response(status, whole_items) | {"error": error}
        self._keep(response)
        return self._event("response.failed", {"response": response})

    def _id(self, prefix: str) -> str:
        """Return the id of the next item."""
        return f"{prefix}_{self._plan.id.removeprefix(ID_PREFIX)}_{len(self._items)}"

    def _of_item(self) -> Object:
        """Return the position of the last item in the response."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _of_part(self) -> Object:
        """Return the position of the text part in the response."""
        return self._of_item() | {"content_index": 0}

    def _item_event(self, kind: str) -> bytes:
        return self._event(kind, {"output_index": len(self._items) - 1, "item": self._items[-1]})

    def _output_text(self) -> Object:
        said = "".join(self._text)
        return {"type": "output_text", "text": said, "annotations": [], "logprobs": [*self._sent_logprobs]}

    def _reasoning_text(self) -> Object:
        return {"type": "reasoning_text", "text": "".join(self._text)}

    def _logprobs_of(self, part: TextPart) -> list[object]:
        """Return log-probabilities of the tokens that begin in this text; those of calls and reasoning are dropped.

        Includes tokens of earlier text: if a stop string may follow, a token arrives after its first characters.
        """
        if self._logprobs is None:
            return []
        earlier: list[object] = []
        if part.start != self._text_end:
            earlier = self._waiting_logprobs()
            self._text_start = part.start
        self._text_end = part.start + len(part.text)
        return earlier + self._waiting_logprobs()

    def _waiting_logprobs(self) -> list[object]:
        """Return log-probabilities of waiting tokens that begin in the last text, and stop waiting for those before."""
        if self._logprobs is None:
            return []
        start, end = self._text_start, self._text_end
        with_logprobs = [token for token in self._waiting if start <= token.start < end]
        self._waiting = [token for token in self._waiting if token.start >= end]
        return [*self._logprobs.tokens(with_logprobs)]

    def _rest_of_logprobs(self) -> bytes:
        """Return an event for waiting tokens whose first characters end a message; drop other waiting tokens."""
        logprobs = self._waiting_logprobs()
        if not logprobs:
            return b""
        self._sent_logprobs += logprobs
        return self._event("response.output_text.delta", self._of_part() | {"delta": "", "logprobs": logprobs})

    @property
    def _in_call(self) -> bool:
        return self._open == "function_call"

    def _usage(self) -> Object:
        num_input, num_output = self._plan.num_prompt_tokens, self._log.num_output_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._log.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._parts.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }

    def _event(self, kind: str, members: Object) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1} | members, kind)


def _shown_choice(fields: ResponsesRequest) -> object:
    choice = fields.tool_choice
    return "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump()
