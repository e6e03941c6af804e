"""`POST /v1/completions`: makes a plan of prompts, and writes the answer in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from router.api.openai.choice_shape import ChoiceShape, merged
from router.generation import (
    AnswerChoice,
    AnswerPlan,
    Object,
    Origin,
    Piece,
    PlannedPrompt,
    Service,
    TokenWithLogprobs,
    answer_grammar,
    bad_words,
    check_num_sequences,
    fit,
    make_plan,
    num_kept,
    num_prompt_logprobs,
    truncated,
)
from router.request.fields import CompletionRequest
from router.text import middle_form

DEFAULT_MAX_TOKENS = 16
"""As OpenAI's API says of completions."""


async def plan_completion(service: Service, fields: CompletionRequest, origin: Origin) -> AnswerPlan:
    """Tokenise the prompts. Raises RequestError."""
    service.check_model(fields.model)
    fields.check()
    sources = _sources(fields.prompt)
    check_num_sequences(service, len(sources), max(fields.num_sampled, fields.num_beams))
    grammar = await answer_grammar(service, fields, origin.key)
    prompts = [await _prompt(service, fields, source, param) for source, param in sources]
    return make_plan(
        service,
        fields,
        origin,
        prompts,
        prefix="cmpl-",
        num_prompt_logprobs=num_prompt_logprobs(service, fields, fields.echo_logprobs),
        echo=bool(fields.echo),
        grammar=grammar,
        bad_words=await bad_words(service, fields),
    )


def _sources(prompt: str | list[int] | list[str] | list[list[int]]) -> list[tuple[str | list[int], str]]:
    """Each prompt with the name of its field."""
    if isinstance(prompt, str):
        return [(prompt, "prompt")]
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    if isinstance(prompt[0], int):
        return [([part for part in prompt if isinstance(part, int)], "prompt")]
    return [(part, f"prompt[{i}]") for i, part in enumerate(prompt) if isinstance(part, str | list)]


async def _prompt(service: Service, fields: CompletionRequest, source: str | list[int], param: str) -> PlannedPrompt:
    limit, text = service.max_model_len, service.text
    echo = ""
    if isinstance(source, str):
        token_ids = await _encoded(service, fields, source)
        echo = source if fields.echo else ""
    else:
        token_ids = source
    if fields.suffix:
        token_ids = await _around_middle(service, fields, token_ids)
    wanted = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    token_ids = truncated(token_ids, fields, limit, max(1, wanted)) or _begin_of_text(service, param)
    max_tokens = fit(len(token_ids), fields.max_tokens, limit, default=DEFAULT_MAX_TOKENS, param=param)
    if not isinstance(source, str):
        text.check_ids(token_ids, param=param)  # only after `fit` has bounded their number
        if fields.echo:
            echo = await text.decode(token_ids, skip_special_tokens=fields.skip_special_tokens is not False)
    return PlannedPrompt(token_ids, max_tokens, echo)


async def _encoded(service: Service, fields: CompletionRequest, source: str) -> list[int]:
    """The tokens of a text prompt, which may be too long where it will be truncated."""
    special = fields.add_special_tokens is not False
    if fields.truncate_prompt_tokens is None:
        return await service.text.encode(source, add_special_tokens=special, limit=service.max_model_len)
    wanted = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    keep = 0 if fields.suffix else num_kept(fields, service.max_model_len, max(1, wanted))
    most, side = service.max_tokenize_bytes, fields.truncation_side or "left"
    return await service.text.encode(source, add_special_tokens=special, max_bytes=most, keep=keep, side=side)


async def _around_middle(service: Service, fields: CompletionRequest, before: list[int]) -> list[int]:
    """The prompt for the text between `before` and the suffix. Raises InvalidRequest for a model that cannot."""
    form = middle_form(service.text.tokenizer)
    if form is None:
        raise InvalidRequest("suffix: this model has no tokens for a text behind its answer", param="suffix")
    if fields.echo_logprobs is not None:
        raise InvalidRequest("suffix: not allowed with echo and logprobs", param="suffix")
    limit = service.max_model_len
    after = await service.text.encode(fields.suffix or "", add_special_tokens=False, limit=limit)
    opening = await service.text.encode("", add_special_tokens=True)  # where a text prompt has such tokens
    begins = before[: len(opening)] == opening
    return [*opening, *form.prompt(before[len(opening) :], after)] if begins else form.prompt(before, after)


def _begin_of_text(service: Service, param: str) -> list[int]:
    """The prompt in place of an empty one. Raises InvalidRequest for a model without such a token."""
    bos = service.text.tokenizer.token_to_id(service.files.bos_token) if service.files.bos_token else None
    if bos is None:
        raise InvalidRequest(f"{param}: must not be empty", param=param)
    return [bos]


class CompletionShape(ChoiceShape):
    """Completion answers and chunks."""

    object = chunk_object = "text_completion"

    def __init__(self, service: Service, fields: CompletionRequest) -> None:
        super().__init__(service, fields)
        self._echo_has_logprobs = fields.echo_logprobs is not None
        self._skip_special = fields.skip_special_tokens is not False
        self.only_text = self._logprobs is None and not self._token_ids

    def opening(self, choice: AnswerChoice, prompt_token_ids: list[int] | None) -> Object | None:
        """The echo, unless it needs log-probabilities, and the prompt's token ids if the client wants them."""
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
        """Log-probabilities of generated tokens; with `echoes` those of the prompt's tokens come first."""
        if self._logprobs is None:
            return None
        generated = self._logprobs.completion(tokens, len(choice.echo))
        if not echoes:
            return {**generated}
        prompt = self._logprobs.echo(choice, skip_special_tokens=self._skip_special)
        return {key: prompt[key] + generated[key] for key in generated}
