"""OpenAI's Completions API: `POST /v1/completions`. `POST /invocations` accepts conversations too."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.api.openai.answers import ChatCompletion, Completion
from router.api.openai.chat import BaseFormatter, ChatFormatter, merged
from router.api.openapi import documented
from router.generation import (
    AnswerChoice,
    Object,
    OpenAISerializer,
    Piece,
    ServedModel,
    TokenWithLogprobs,
    generation_call,
    plan_chat,
    plan_completion,
)
from router.request import COMPLETION_PATH, INVOCATIONS_PATH, Invocation
from router.request.fields import ChatRequest, CompletionRequest

completion_routes = APIRouter(tags=["generate"])


@completion_routes.post(COMPLETION_PATH, **documented(CompletionRequest, Completion, streams=True))
async def completions(request: Request) -> Response:
    """Generate the continuation of a text (OpenAI's Completions API)."""
    async with generation_call(request, CompletionRequest) as (call, fields):
        model, plan = await call.plan(fields, plan_completion)
        return call.answer(model, plan, OpenAISerializer(model, plan, CompletionFormatter(model, fields), call.log))


@completion_routes.post(
    INVOCATIONS_PATH, **documented(ChatRequest | CompletionRequest, ChatCompletion | Completion, streams=True)
)
async def invocations(request: Request) -> Response:
    """Generate a chat completion if the body has `messages`, or a text completion if it has a `prompt`."""
    formatter: ChatFormatter | CompletionFormatter
    async with generation_call(request, Invocation) as (call, body):
        fields = body.root
        if isinstance(fields, ChatRequest):
            model, plan = await call.plan(fields, plan_chat)
            formatter = ChatFormatter(model, fields)
        else:
            model, plan = await call.plan(fields, plan_completion)
            formatter = CompletionFormatter(model, fields)
        return call.answer(model, plan, OpenAISerializer(model, plan, formatter, call.log))


class CompletionFormatter(BaseFormatter):
    """Formatter of text completions and their chunks."""

    object = chunk_object = "text_completion"

    def __init__(self, model: ServedModel, fields: CompletionRequest) -> None:
        super().__init__(model, fields)
        self._echo_has_logprobs = fields.echo_logprobs is not None
        self._skip_special = fields.skip_special_tokens is not False
        self.only_text = self._logprobs is None and not self._token_ids

    def opening(self, choice: AnswerChoice, prompt_token_ids: list[int] | None) -> Object | None:
        """Return the echo, unless it needs log-probabilities, and the prompt's token ids if requested."""
        text = "" if self._echo_has_logprobs else choice.echo
        if not text and prompt_token_ids is None:
            return None
        chunk: Object = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}
        if prompt_token_ids is not None:
            chunk |= {"prompt_token_ids": prompt_token_ids, "token_ids": []}
        return chunk

    def chunks(self, choice: AnswerChoice, piece: Piece, *, at_least_one: bool) -> list[Object]:
        with_logprobs = piece.with_logprobs if self._logprobs is not None else []
        echoes = piece.first and self._echo_has_logprobs
        if not (piece.text or with_logprobs or echoes or piece.finish_reason or self._token_ids or at_least_one):
            return []
        chunk: Object = {
            "index": choice.index,
            "text": choice.echo + piece.text if echoes else piece.text,
            "logprobs": self._logprobs_of(choice, with_logprobs, echoes=echoes) if with_logprobs or echoes else None,
            "finish_reason": piece.finish_reason or None,
        }
        if piece.finish_reason:
            chunk["stop_reason"] = choice.stop_reason
        if self._token_ids:
            chunk["token_ids"] = piece.token_ids
        return [chunk]

    def whole(self, choice: AnswerChoice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        answer = merged(choice, pieces)
        whole: Object = {
            "index": choice.index,
            "text": choice.echo + answer.text,
            "logprobs": self._logprobs_of(choice, answer.with_logprobs, echoes=self._echo_has_logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": answer.token_ids if self._token_ids else None,
            "prompt_token_ids": prompt_token_ids,
            **self._of_prompt(choice),
        }
        return whole

    def envelope(self, first: AnswerChoice, prompt_token_ids: list[int] | None) -> Object:
        return {}

    def _logprobs_of(self, choice: AnswerChoice, tokens: Sequence[TokenWithLogprobs], *, echoes: bool) -> Object | None:
        """Return log-probabilities of generated tokens; with `echoes`, those of the prompt's tokens come first."""
        if self._logprobs is None:
            return None
        generated = self._logprobs.completion(tokens, len(choice.echo))
        if not echoes:
            return {**generated}
        prompt = self._logprobs.echo(choice, skip_special_tokens=self._skip_special)
        return {key: prompt[key] + generated[key] for key in generated}
