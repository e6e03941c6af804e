"""Plans of answers that are made of prompts alone: from texts to the prompts that the prefill workers compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.errors import ContextLengthExceeded, InvalidRequest
from router.api.embeddings.fields import EmbeddingRequest, PoolingFields, RerankRequest, ScoreRequest
from router.generation import AnswerPlan, Origin, PlannedPrompt, Service, make_plan

MAX_TOKENS = 300_000
"""Of all inputs of a request together, as OpenAI has it; more where the model takes more of one input."""
MOST_AT_ONCE = 64
"""Prompts of a request that are with the pools at a time, so that others have their turns between them."""


async def plan_embeddings(service: Service, fields: EmbeddingRequest, origin: Origin) -> AnswerPlan:
    """Tokenise the inputs. Raises RequestError."""
    service.check_model(fields.model)
    fields.check()
    sources, width = fields.sources, service.task.width
    if fields.dimensions is not None and fields.dimensions > width:
        raise InvalidRequest(
            f"dimensions: {fields.dimensions:,} are more than the {width:,} that the model's embeddings have",
            param="dimensions",
        )
    special = fields.add_special_tokens is not False
    inputs = _Inputs(service, fields)
    prompts = [await inputs.prompt(source, param, special=special) for source, param in sources]
    plan = _plan(service, fields, origin, prompts, "embd-")
    return replace(plan, num_values=0 if fields.encoding_format == "base64" else plan.num_values)


async def plan_scores(service: Service, fields: ScoreRequest | RerankRequest, origin: Origin) -> AnswerPlan:
    """Tokenise pairs for a model that scores them, or the texts of both sides for one that embeds. Raises RequestError.

    The prompts of an embedding model are the texts of the first side, and behind them those of the second.
    """
    service.check_model(fields.model)
    fields.check()
    first, second = fields.sides
    names = ("query", "documents") if isinstance(fields, RerankRequest) else ("text_1", "text_2")
    inputs = _Inputs(service, fields)
    if service.task.name == "score":
        pairs = zip(first * (len(second) if len(first) == 1 else 1), second, strict=True)
        prompts = [await inputs.prompt(one, names[1], second=other) for one, other in pairs]
    else:
        texts = [(text, names[0]) for text in first] + [(text, names[1]) for text in second]
        prompts = [await inputs.prompt(text, name) for text, name in texts]
    return _plan(service, fields, origin, prompts, "rerank-" if isinstance(fields, RerankRequest) else "score-")


def _plan(
    service: Service, fields: PoolingFields, origin: Origin, prompts: Sequence[PlannedPrompt], prefix: str
) -> AnswerPlan:
    plan = make_plan(service, fields.as_completion(), origin, prompts, prefix=prefix, pooled=True)
    most = min(MOST_AT_ONCE, max(1, service.config.max_inflight // 2))
    return replace(plan, num_values=len(prompts) * service.task.width, most_at_once=most)


class _Inputs:
    """Makes prompts of a request's texts, within its bounds."""

    def __init__(self, service: Service, fields: PoolingFields) -> None:
        self._service = service
        self._limit, self._num_tokens = service.max_model_len, 0
        self._keep, self._side = fields.truncate_prompt_tokens, fields.truncation_side or "right"
        if self._keep is not None and self._keep > self._limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {self._keep:,} are more than the {self._limit:,} tokens that the model takes",
                param="truncate_prompt_tokens",
            )
        if self._keep is not None and self._keep < 0:
            self._keep = self._limit

    async def prompt(
        self, source: str | list[int], param: str, *, special: bool = True, second: str | None = None
    ) -> PlannedPrompt:
        """The prompt of an input, or of a pair. Raises InvalidRequest, ContextLengthExceeded, Unavailable."""
        if isinstance(source, str):
            token_ids = await self._encoded(source, second, param, special)
        else:
            token_ids = source
            if self._keep is not None:
                token_ids = source[-self._keep :] if self._side == "left" else source[: self._keep]
        if not token_ids:
            raise InvalidRequest(f"{param}: must not be empty", param=param)
        if len(token_ids) > self._limit:
            raise ContextLengthExceeded(len(token_ids), self._limit, 0, where=param)
        self._num_tokens += len(token_ids)
        most = max(MAX_TOKENS, self._limit)
        if self._num_tokens > most:
            raise InvalidRequest(
                f"{param}: the inputs up to this one have {self._num_tokens:,} tokens, one request may have {most:,}",
                param=param,
            )
        if not isinstance(source, str):
            self._service.text.check_ids(token_ids, param=param)
        return PlannedPrompt(token_ids, 1)

    async def _encoded(self, text: str, second: str | None, param: str, special: bool) -> list[int]:
        encode, keep = self._service.text.encode, self._keep
        if keep is None:
            try:
                return await encode(text, add_special_tokens=special, limit=self._limit, second=second)
            except ContextLengthExceeded as error:
                told = ContextLengthExceeded(error.num_prompt_tokens, self._limit, 0, where=param, at_least=True)
                raise told from error
        most, side = self._service.max_tokenize_bytes, self._side
        return await encode(text, add_special_tokens=special, max_bytes=most, second=second, keep=keep, side=side)
