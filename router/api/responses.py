"""`POST /v1/responses`: answers conversations in the shape of OpenAI's Responses API, and stores nothing."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import RequestError
from router.api.choice_shape import merged
from router.api.responses_fields import ResponsesRequest
from router.generation.answer_frames import event
from router.generation.choice import AnswerChoice, Piece, TokenWithLogprobs
from router.generation.logprobs import LogprobShapes
from router.generation.parts import AnswerParts
from router.generation.plan import AnswerPlan
from router.generation.request_log import RequestLog
from router.generation.service import Service
from router.generation.shape import Object
from router.text.answer_part import CallPart, Part, TextPart, ThoughtPart


class ResponsesFrames:
    """A response of items: messages and calls of functions. Events open, fill and close one after the other."""

    def __init__(self, service: Service, fields: ResponsesRequest, plan: AnswerPlan, log: RequestLog) -> None:
        self._fields, self._plan, self._log = fields, plan, log
        self._parts = AnswerParts(service, plan.fields)
        self._logprobs = LogprobShapes(service.text, fields.top_logprobs or 0) if fields.wants_logprobs else None
        self._items: list[Object] = []
        self._text: list[str] = []
        self._arguments: list[str] = []
        self._sent_logprobs: list[object] = []
        self._waiting: list[TokenWithLogprobs] = []  # until the text part comes that they belong to
        self._is_open = False
        self._num_events = 0

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        (choice,) = self._plan.choices
        self.chunk(choice, merged(choice, pieces[0]))  # it collects the items; the events are not sent
        return self._response(choice)

    def opening(self) -> bytes:
        begun: Object = {"response": self._response(None)}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def chunk(self, choice: AnswerChoice, piece: Piece) -> bytes:
        if self._logprobs is not None:
            self._waiting += piece.with_logprobs
        events = [self._add(choice, part) for part in self._parts.taken_apart(choice, piece)]
        if piece.finish_reason:
            if not self._items:
                events.append(self._begin_message())
            cut = piece.finish_reason == "length" and not (self._in_call and self._parts.calls_are_whole(choice))
            events.append(self._end_item("incomplete" if cut else "completed"))
        return b"".join(events)

    def ending(self) -> bytes:
        response = self._response(self._plan.choices[0])
        return self._event(f"response.{response['status']}", {"response": response})

    def error(self, error: RequestError) -> bytes:
        failed = {"status": "failed", "error": {"code": error.code or error.type, "message": error.message}}
        return self._event("response.failed", {"response": self._response(None) | failed})

    # ------------------------------------------------------------ items

    def _add(self, choice: AnswerChoice, part: Part) -> bytes:
        if isinstance(part, ThoughtPart):
            return b""  # the Responses API does not show thoughts
        return self._say(part) if isinstance(part, TextPart) else self._add_call(choice, part)

    def _say(self, part: TextPart) -> bytes:
        begun = self._begin_message() if not self._is_open or self._in_call else b""
        logprobs = self._logprobs_of(part)
        self._text.append(part.text)
        self._sent_logprobs += logprobs
        added = {"delta": part.text, "logprobs": logprobs}
        return begun + self._event("response.output_text.delta", self._of_part() | added)

    def _begin_message(self) -> bytes:
        self._text, self._sent_logprobs = [], []
        name = f"msg_{self._plan.id}_{len(self._items)}"
        begun = self._begin({"type": "message", "id": name, "role": "assistant", "content": []})
        return begun + self._event("response.content_part.added", self._of_part() | {"part": self._output_text()})

    def _add_call(self, choice: AnswerChoice, part: CallPart) -> bytes:
        begun = b""
        if part.name:
            call_id = self._parts.id_of(choice, part.index)
            call = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": part.name}
            begun = self._begin({**call, "arguments": ""})
            self._arguments = []
        if not part.arguments:
            return begun
        self._arguments.append(part.arguments)
        added = self._of_item() | {"delta": part.arguments}
        return begun + self._event("response.function_call_arguments.delta", added)

    def _begin(self, item: Object) -> bytes:
        """Close the open item and begin another."""
        ended = self._end_item()
        self._items.append(item | {"status": "in_progress"})
        self._is_open = True
        return ended + self._item_event("response.output_item.added")

    def _end_item(self, status: str = "completed") -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        if item["type"] == "message":
            part = self._output_text()
            item |= {"content": [part]}
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            ended = self._event("response.output_text.done", self._of_part() | said)
            ended += self._event("response.content_part.done", self._of_part() | {"part": part})
        else:
            item |= {"arguments": "".join(self._arguments)}
            called = self._of_item() | {"name": item["name"], "arguments": item["arguments"]}
            ended = self._event("response.function_call_arguments.done", called)
        item["status"] = status
        return ended + self._item_event("response.output_item.done")

    # ------------------------------------------------------------ inside

    def _of_item(self) -> Object:
        """The place of the last item in the response."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _of_part(self) -> Object:
        """The place of the text part in the response."""
        return self._of_item() | {"content_index": 0}

    def _item_event(self, kind: str) -> bytes:
        return self._event(kind, {"output_index": len(self._items) - 1, "item": self._items[-1]})

    def _output_text(self) -> Object:
        return {
            "type": "output_text",
            "text": "".join(self._text),
            "annotations": [],
            "logprobs": [*self._sent_logprobs],
        }

    def _logprobs_of(self, part: TextPart) -> list[object]:
        """Log-probabilities of the tokens that begin in this text; earlier ones, of calls and thoughts, are dropped."""
        if self._logprobs is None:
            return []
        end = part.start + len(part.text)
        with_logprobs = [token for token in self._waiting if part.start <= token.start < end]
        self._waiting = [token for token in self._waiting if token.start >= end]
        return [*self._logprobs.tokens(with_logprobs)]

    @property
    def _in_call(self) -> bool:
        return bool(self._items) and self._items[-1]["type"] == "function_call"

    def _response(self, choice: AnswerChoice | None) -> Object:
        """The response with the finished `choice`, or as it begins."""
        fields, cut = self._fields, choice is not None and choice.finish_reason == "length"
        wanted = fields.text.format if fields.text is not None else None
        return {
            "id": self._plan.id,
            "object": "response",
            "created_at": self._plan.created,
            "status": "in_progress" if choice is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self._plan.model,
            "output": [] if choice is None else self._items,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
            "tool_choice": _shown_choice(fields),
            "tools": [tool.model_dump() for tool in fields.tools or ()],
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
            "truncation": "disabled",
            "usage": None if choice is None else self._usage(),
            "user": fields.user,
            "metadata": fields.metadata or {},
        }

    def _usage(self) -> Object:
        num_input, num_output = self._plan.num_prompt_tokens, self._log.num_output_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._log.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }

    def _event(self, kind: str, members: Object) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1} | members, kind)


def _shown_choice(fields: ResponsesRequest) -> object:
    choice = fields.tool_choice
    return "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump()
