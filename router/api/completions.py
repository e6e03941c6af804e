"""`POST /v1/completions`: prompts into a plan, and its answer into OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from router.auth.keys import ApiKey
from router.generation.choice import Choice, Piece, TokenWithLogprobs
from router.generation.logprobs import LogprobShapes
from router.generation.plan import Plan, Prompt, check_num_sequences, fit, make_plan
from router.generation.service import Service
from router.generation.shape import Object
from router.generation.structure import answer_grammar
from router.request.fields import CompletionRequest

DEFAULT_MAX_TOKENS = 16


async def plan_completion(service: Service, fields: CompletionRequest, key: ApiKey, traceparent: str) -> Plan:
    """Tokenises the prompts. Raises RequestError."""
    service.check_model(fields.model)
    fields.check()
    sources = _sources(fields.prompt)
    check_num_sequences(service, len(sources), fields.n or 1)
    grammar = await answer_grammar(service, fields)
    prompts = [await _prompt(service, fields, source, param) for source, param in sources]
    return make_plan(
        service,
        fields,
        key,
        prompts,
        prefix="cmpl",
        num_logprobs=-1 if fields.logprobs is None else fields.logprobs,
        num_prompt_logprobs=max(-1 if k is None else k for k in (fields.prompt_logprobs, fields.echo_logprobs)),
        traceparent=traceparent,
        echo=bool(fields.echo),
        grammar=grammar,
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


async def _prompt(service: Service, fields: CompletionRequest, source: str | list[int], param: str) -> Prompt:
    limit, text = service.max_model_len, service.text
    echo = ""
    if isinstance(source, str):
        special = fields.add_special_tokens is not False
        token_ids = await text.encode(source, add_special_tokens=special, limit=limit)
        echo = source
    else:
        token_ids = source
    token_ids = token_ids or _begin_of_text(service, param)
    max_tokens = fit(len(token_ids), fields.max_tokens, limit, default=DEFAULT_MAX_TOKENS, param=param)
    if not isinstance(source, str):
        text.check_ids(token_ids, param=param)  # after their number: a million are not looked at
        if fields.echo:
            echo = await text.decode(token_ids, skip_special_tokens=fields.skip_special_tokens is not False)
    return Prompt(token_ids, max_tokens, echo)


def _begin_of_text(service: Service, param: str) -> list[int]:
    """The prompt that stands for no prompt. Raises InvalidRequest for a model without a token for it."""
    bos = service.text.tokenizer.token_to_id(service.files.bos_token) if service.files.bos_token else None
    if bos is None:
        raise InvalidRequest(f"{param}: must not be empty", param=param)
    return [bos]


class CompletionShape:
    """Completion answers and chunks."""

    object = chunk_object = "text_completion"

    def __init__(self, service: Service, fields: CompletionRequest) -> None:
        self._logprobs = (
            LogprobShapes(service.text, fields.logprobs, as_ids=bool(fields.return_tokens_as_token_ids))
            if fields.logprobs is not None
            else None
        )
        wanted = fields.prompt_logprobs
        self._prompt_logprobs = LogprobShapes(service.text, wanted) if wanted is not None else None
        self._echo_has_logprobs = fields.echo_logprobs is not None
        self._skip_special = fields.skip_special_tokens is not False
        self._token_ids = bool(fields.return_token_ids)

    def opening(self, choice: Choice, prompt_token_ids: list[int] | None) -> Object | None:
        """The echo, unless it comes with log-probabilities; and the prompt's tokens, for those who want them."""
        text = "" if self._echo_has_logprobs else choice.echo
        if not text and prompt_token_ids is None:
            return None
        chunk: Object = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}
        if prompt_token_ids is not None:
            chunk |= {"prompt_token_ids": prompt_token_ids, "token_ids": []}
        return chunk

    def chunks(self, choice: Choice, piece: Piece, *, at_least_one: bool) -> list[Object]:
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
        if self._token_ids:
            chunk["token_ids"] = piece.token_ids
        return [chunk]

    def whole(self, choice: Choice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        with_logprobs = [token for piece in pieces for token in piece.with_logprobs]
        whole: Object = {
            "index": choice.index,
            "text": choice.echo + "".join([piece.text for piece in pieces]),
            "logprobs": self._logprobs_of(choice, with_logprobs, echoes=self._echo_has_logprobs),
            "finish_reason": choice.finish_reason,
        }
        if self._prompt_logprobs is not None:
            prompt = choice.request.prompt_token_ids
            whole["prompt_logprobs"] = self._prompt_logprobs.prompt(prompt, choice.prompt_logprobs)
        if self._token_ids:
            whole["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
            whole["prompt_token_ids"] = prompt_token_ids
        return whole

    def envelope(self, first: Choice, prompt_token_ids: list[int] | None) -> Object:
        return {}

    def _logprobs_of(self, choice: Choice, tokens: Sequence[TokenWithLogprobs], *, echoes: bool) -> Object | None:
        """Log-probabilities of generated tokens, with `echoes` behind those of the prompt's."""
        if self._logprobs is None:
            return None
        generated = self._logprobs.completion(tokens, len(choice.echo))
        if not echoes:
            return {**generated}
        prompt = self._logprobs.echo(choice, skip_special_tokens=self._skip_special)
        return {key: prompt[key] + generated[key] for key in generated}
