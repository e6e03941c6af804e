"""OpenAI's Chat Completions API: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.api.openai.answers import ChatCompletion
from router.api.openapi import documented
from router.generation import (
    AnswerChoice,
    AnswerParts,
    LogprobFormatter,
    Object,
    OpenAISerializer,
    Piece,
    ServedModel,
    generation_call,
    plan_chat,
)
from router.request import CHAT_PATH
from router.request.fields import ChatRequest, SamplingFields
from router.text import CallPart, Part, TextPart, ThoughtPart


class BaseFormatter:
    """Request settings that both shapes use."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        return None

    def __init__(self, model: ServedModel, fields: SamplingFields) -> None:
        as_ids, wanted, of_prompt = fields.return_tokens_as_token_ids, fields.num_alternatives, fields.prompt_logprobs
        self._logprobs = self._prompt_logprobs = None
        if wanted is not None:
            number = len(fields.logprob_token_ids or ()) or model.num_alternatives(wanted, "logprobs")
            self._logprobs = LogprobFormatter(model.text, number, as_ids=bool(as_ids))
        if of_prompt is not None:
            self._prompt_logprobs = LogprobFormatter(model.text, model.num_alternatives(of_prompt, "prompt_logprobs"))
        self._token_ids, self._streams = bool(fields.return_token_ids), bool(fields.stream)

    def _of_prompt(self, choice: AnswerChoice) -> Object:
        """Return the member `prompt_logprobs`; null if it was not requested."""
        if self._prompt_logprobs is None:
            return {"prompt_logprobs": None}
        token_ids = choice.request.prompt_token_ids
        return {"prompt_logprobs": self._prompt_logprobs.prompt(token_ids, choice.prompt_logprobs)}


def merged(choice: AnswerChoice, pieces: Sequence[Piece]) -> Piece:
    """Merge all pieces of a finished choice into one."""
    return Piece(
        text="".join([piece.text for piece in pieces]),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        with_logprobs=[token for piece in pieces for token in piece.with_logprobs],
        finish_reason=choice.finish_reason,
    )


chat_routes = APIRouter(tags=["generate"])


@chat_routes.post(CHAT_PATH, **documented(ChatRequest, ChatCompletion, streams=True))
async def chat_completions(request: Request) -> Response:
    """Generate the next message of a conversation (OpenAI's Chat Completions API)."""
    async with generation_call(request, ChatRequest) as (call, fields):
        model, plan = await call.plan(fields, plan_chat)
        return call.answer(model, plan, OpenAISerializer(model, plan, ChatFormatter(model, fields), call.log))


class ChatFormatter(BaseFormatter):
    """Formatter of chat completions and their chunks."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: ServedModel, fields: ChatRequest) -> None:
        super().__init__(model, fields)
        self._echo, self._echoed_thought = _split_echo(model, fields)
        self._parts = AnswerParts(model, fields)
        self.only_text = self._parts.only_text and self._logprobs is None and not self._token_ids

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._parts.num_reasoning_tokens

    def opening(self, choice: AnswerChoice, prompt_token_ids: list[int] | None) -> Object | None:
        delta: Object = {"role": "assistant", "content": self._echo}
        return _chunk(choice, delta | (_thought(self._echoed_thought) if self._echoed_thought else {}))

    def chunks(self, choice: AnswerChoice, piece: Piece, *, at_least_one: bool) -> list[Object]:
        """Return a chunk for each part, in text order. The first has the log-probabilities and token ids."""
        if self.only_text and piece.text and not piece.finish_reason:  # the common case
            return [_chunk(choice, {"content": piece.text})]
        deltas = [self._delta(choice, part) for part in self._parts.split(choice, piece)]
        with_logprobs = piece.with_logprobs if self._logprobs is not None else []
        if not deltas:
            if not (with_logprobs or piece.finish_reason or self._token_ids or at_least_one):
                return []
            deltas = [{} if piece.finish_reason else {"content": ""}]
        chunks = [_chunk(choice, delta) for delta in deltas]
        if self._logprobs is not None and with_logprobs:
            chunks[0]["logprobs"] = self._logprobs.chat(with_logprobs)
        if piece.finish_reason:
            chunks[-1]["finish_reason"] = self._parts.finish_reason(choice, piece.finish_reason)
            chunks[-1]["stop_reason"] = choice.stop_reason
        if self._token_ids:
            for chunk in chunks:
                chunk["token_ids"] = piece.token_ids if chunk is chunks[0] else []
        return chunks

    def whole(self, choice: AnswerChoice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        answer = merged(choice, pieces)
        parts = self._parts.whole(choice, pieces)
        content = self._echo + "".join([part.text for part in parts if isinstance(part, TextPart)])
        message: Object = {"role": "assistant", "content": content, "refusal": None}
        if thought := self._echoed_thought + "".join([part.text for part in parts if isinstance(part, ThoughtPart)]):
            message |= _thought(thought)
        if calls := [self._call(choice, part) for part in parts if isinstance(part, CallPart)]:
            message |= {"content": content or None, "tool_calls": calls}
        whole: Object = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs.chat(answer.with_logprobs) if self._logprobs is not None else None,
            "finish_reason": self._parts.finish_reason(choice, choice.finish_reason),
        }
        whole |= {"token_ids": answer.token_ids if self._token_ids else None, "stop_reason": choice.stop_reason}
        return whole

    def _delta(self, choice: AnswerChoice, part: Part) -> Object:
        if isinstance(part, ThoughtPart):
            return _thought(part.text)
        if isinstance(part, TextPart):
            return {"content": part.text}
        call = self._call(choice, part) if part.name else {"function": {"arguments": part.arguments}}
        return {"tool_calls": [{"index": part.index, **call}]}

    def _call(self, choice: AnswerChoice, part: CallPart) -> Object:
        function = {"name": part.name, "arguments": part.arguments}
        return {"id": self._parts.id_of(choice, part.index), "type": "function", "function": function}

    def envelope(self, first: AnswerChoice, prompt_token_ids: list[int] | None) -> Object:
        if self._streams:
            return {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
        return {"prompt_token_ids": prompt_token_ids, **self._of_prompt(first)}


def _split_echo(model: ServedModel, fields: ChatRequest) -> tuple[str, str]:
    """Split the echoed text into content and the unfinished thought that the answer continues."""
    echo = fields.echo_text
    marks = model.thoughts_of(with_tools=fields.offers_tools) if fields.continued_text else None
    thought = marks.open_thought(echo) if marks is not None else None
    if marks is None or thought is None:
        return echo, ""
    return echo[: len(echo) - len(marks.start) - len(thought)], thought.lstrip()


def _thought(text: str) -> Object:
    """Return a thought under both names that clients use."""
    return {"reasoning_content": text, "reasoning": text}


def _chunk(choice: AnswerChoice, delta: Object) -> Object:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
