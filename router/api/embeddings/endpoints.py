"""Embedding, score and rerank endpoints, whose answers the prefill pool computes from prompts."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import exp, hypot
from operator import mul

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.errors import ContextLengthExceeded, InvalidRequest, RequestError
from router.api.embeddings.answers import EmbeddingList, Ranking, ScoreList
from router.api.embeddings.fields import EmbeddingRequest, PoolingFields, RerankRequest, ScoreRequest
from router.api.openapi import documented
from router.generation import (
    AnswerChoice,
    AnswerPlan,
    Object,
    Piece,
    PlannedPrompt,
    RequestContext,
    ServedModel,
    generation_call,
    make_plan,
)
from router.request import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH


def numbers_of(values: bytes) -> array[float]:
    """Decode little-endian float32 values. All supported machines are little-endian."""
    return array("f", values)


def normalised(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the vector scaled to length one. A zero vector is returned unchanged."""
    wide = vector.astype(np.float64)
    length = np.linalg.norm(wide)
    return (wide / length).astype(np.float32) if length else vector


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = hypot(*one) * hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0


def sigmoid(number: float) -> float:
    """Return 1 / (1 + exp(-number)) without overflow."""
    if number >= 0:
        return 1.0 / (1.0 + exp(-number))
    grown = exp(number)
    return grown / (1.0 + grown)


MAX_TOKENS = 300_000
"""OpenAI's limit on the tokens of all inputs of a request; higher if the model accepts more in one input."""
NUMBERS_IN_BASE64 = 4
"""How many numbers in base64 take as long to write as one in decimal."""
MOST_AT_ONCE = 64
"""Maximum number of prompts of one request at the workers at a time, so that other requests can run in between."""


async def plan_embeddings(model: ServedModel, fields: EmbeddingRequest, context: RequestContext) -> AnswerPlan:
    """Tokenise the inputs and plan their embeddings. Raises RequestError."""
    fields.check()
    sources, width = fields.sources, model.task.width
    if fields.dimensions is not None and fields.dimensions > width:
        raise InvalidRequest(
            f"dimensions: must be at most {width:,}, the size of the model's embeddings, got {fields.dimensions:,}",
            param="dimensions",
        )
    special = fields.add_special_tokens is not False
    inputs = _Inputs(model, fields)
    prompts = [await inputs.prompt(source, param, special=special) for source, param in sources]
    plan = _plan(model, fields, context, prompts, "embd-")
    in_base64 = fields.encoding_format == "base64"
    return replace(plan, num_values=plan.num_values // NUMBERS_IN_BASE64) if in_base64 else plan


async def plan_scores(model: ServedModel, fields: ScoreRequest | RerankRequest, context: RequestContext) -> AnswerPlan:
    """Tokenise the pairs for a scoring model, or the texts of both sides for an embedding model. Raises RequestError.

    For an embedding model, the prompts are the texts of the first side followed by those of the second.
    """
    fields.check()
    first, second = fields.sides
    names = ("query", "documents") if isinstance(fields, RerankRequest) else ("text_1", "text_2")
    inputs = _Inputs(model, fields)
    if model.task.name == "score":
        pairs = zip(first * (len(second) if len(first) == 1 else 1), second, strict=True)
        prompts = [await inputs.prompt(one, names[1], second=other) for one, other in pairs]
    else:
        texts = [(text, names[0]) for text in first] + [(text, names[1]) for text in second]
        prompts = [await inputs.prompt(text, name) for text, name in texts]
    return _plan(model, fields, context, prompts, "rerank-" if isinstance(fields, RerankRequest) else "score-")


def _plan(
    model: ServedModel, fields: PoolingFields, context: RequestContext, prompts: Sequence[PlannedPrompt], prefix: str
) -> AnswerPlan:
    plan = make_plan(model, fields.as_completion(), context, prompts, prefix=prefix, pooled=True)
    most = min(MOST_AT_ONCE, max(1, model.config.max_inflight // 2))
    return replace(plan, num_values=len(prompts) * model.task.width, most_at_once=most)


class _Inputs:
    """Creates the prompts of a request's inputs, within its limits."""

    def __init__(self, model: ServedModel, fields: PoolingFields) -> None:
        self._model = model
        self._limit, self._num_tokens = model.max_model_len, 0
        self._keep, self._side = fields.truncate_prompt_tokens, fields.truncation_side or "right"
        if self._keep is not None and self._keep > self._limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens: must be at most {self._limit:,}, the model's limit, got {self._keep:,}",
                param="truncate_prompt_tokens",
            )
        if self._keep is not None and self._keep < 0:
            self._keep = self._limit

    async def prompt(
        self, source: str | list[int], param: str, *, special: bool = True, second: str | None = None
    ) -> PlannedPrompt:
        """Create the prompt of an input or a pair. Raises InvalidRequest, ContextLengthExceeded, Unavailable."""
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
                f"{param}: the inputs up to this one have {self._num_tokens:,} tokens; the limit is {most:,}",
                param=param,
            )
        if not isinstance(source, str):
            self._model.text.check_ids(token_ids, param=param)
        return PlannedPrompt(token_ids, 1)

    async def _encoded(self, text: str, second: str | None, param: str, special: bool) -> list[int]:
        encode, keep = self._model.text.encode, self._keep
        if keep is None:
            try:
                return await encode(text, add_special_tokens=special, limit=self._limit, second=second)
            except ContextLengthExceeded as error:
                exceeded = ContextLengthExceeded(error.num_prompt_tokens, self._limit, 0, where=param, at_least=True)
                raise exceeded from error
        most, side = self._model.max_tokenize_bytes, self._side
        return await encode(text, add_special_tokens=special, max_bytes=most, second=second, keep=keep, side=side)


class PooledSerializer(ABC):
    """Base class of `AnswerSerializer` without streaming: these requests have no `stream`."""

    def __init__(self, model: ServedModel, fields: PoolingFields, plan: AnswerPlan) -> None:
        self.task, self.plan = model.task, plan

    @abstractmethod
    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        """Return the answer from the vectors of all prompts."""

    def opening(self) -> bytes:
        return b""

    def chunk(self, choice: AnswerChoice, piece: Piece) -> bytes:
        return b""

    def ending(self) -> bytes:
        return b""

    def error(self, error: RequestError) -> bytes:
        return b""

    @property
    def usage(self) -> Object:
        number = self.plan.num_prompt_tokens
        return {"prompt_tokens": number, "total_tokens": number}


class EmbeddingSerializer(PooledSerializer):
    """Serialises OpenAI's list of embeddings."""

    def __init__(self, model: ServedModel, fields: EmbeddingRequest, plan: AnswerPlan) -> None:
        super().__init__(model, fields, plan)
        self._dimensions, self._in_base64 = fields.dimensions, fields.encoding_format == "base64"
        cuts = fields.dimensions is not None and fields.dimensions < self.task.width
        self._normalises = (self.task.normalise or cuts) if fields.normalize is None else fields.normalize

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        data = [
            {"object": "embedding", "index": choice.index, "embedding": self._shown(choice.pooled)}
            for choice in self.plan.choices
        ]
        return {"object": "list", "data": data, "model": self.plan.model, "usage": self.usage}

    def _shown(self, values: bytes) -> orjson.Fragment:
        """Encode a vector. A single encoding of all vectors would block the other threads for as long as it takes."""
        vector = np.frombuffer(values, np.float32)[: self._dimensions]
        vector = normalised(vector) if self._normalises else vector
        shown = base64.b64encode(vector.tobytes()).decode() if self._in_base64 else vector.tolist()
        return orjson.Fragment(orjson.dumps(shown))


class ScoringSerializer(PooledSerializer):
    """Base class of answers with one score per pair of texts."""

    def __init__(self, model: ServedModel, fields: ScoreRequest | RerankRequest, plan: AnswerPlan) -> None:
        super().__init__(model, fields, plan)
        first, second = fields.sides
        self._num_first, self._num_second = len(first), len(second)

    @property
    def scores(self) -> list[float]:
        """The score of each pair: the output of the model's head, or the cosine of the two embeddings."""
        vectors = [numbers_of(choice.pooled) for choice in self.plan.choices]
        if self.task.name == "score":
            return [sigmoid(number) if self.task.sigmoid else number for (number,) in vectors]
        first, second = vectors[: self._num_first], vectors[self._num_first :]
        return [cosine(first[i if len(first) > 1 else 0], vector) for i, vector in enumerate(second)]

    @property
    def head(self) -> Object:
        return {"id": self.plan.id, "model": self.plan.model}


class ScoreSerializer(ScoringSerializer):
    """Serialises vLLM's list of scores."""

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(self.scores)]
        return {**self.head, "object": "list", "created": self.plan.created, "data": data, "usage": self.usage}


class RerankSerializer(ScoringSerializer):
    """Serialises documents by descending score, in the format of Jina's and Cohere's APIs."""

    def __init__(self, model: ServedModel, fields: RerankRequest, plan: AnswerPlan) -> None:
        super().__init__(model, fields, plan)
        self._documents = fields.documents if fields.return_documents is not False else None
        self._most = fields.top_n or len(fields.documents)

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        ranked = sorted(enumerate(self.scores), key=lambda one: -one[1])[: self._most]
        results = [
            {"index": index, "relevance_score": score}
            | ({"document": {"text": self._documents[index]}} if self._documents is not None else {})
            for index, score in ranked
        ]
        return {**self.head, "usage": self.usage, "results": results}


embedding_routes = APIRouter(tags=["generate"])
"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`."""


@embedding_routes.post(EMBEDDINGS_PATH, **documented(EmbeddingRequest, EmbeddingList))
async def embeddings(request: Request) -> Response:
    """Create an embedding vector for each input text."""
    async with generation_call(request, EmbeddingRequest) as (call, fields):
        model, plan = await call.plan(fields, plan_embeddings, "embed")
        return call.answer(model, plan, EmbeddingSerializer(model, fields, plan))


@embedding_routes.post(SCORE_PATH, **documented(ScoreRequest, ScoreList))
async def score(request: Request) -> Response:
    """Score pairs of texts (vLLM's score API)."""
    async with generation_call(request, ScoreRequest) as (call, fields):
        model, plan = await call.plan(fields, plan_scores, "embed", "score")
        return call.answer(model, plan, ScoreSerializer(model, fields, plan))


@embedding_routes.post(RERANK_PATH, **documented(RerankRequest, Ranking))
async def rerank(request: Request) -> Response:
    """Rank documents by relevance to a query (Jina's and Cohere's rerank APIs)."""
    async with generation_call(request, RerankRequest) as (call, fields):
        model, plan = await call.plan(fields, plan_scores, "embed", "score")
        return call.answer(model, plan, RerankSerializer(model, fields, plan))
