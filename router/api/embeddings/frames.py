"""Writes answers that are made of prompts alone, of the vectors that workers sent."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Sequence

from common.errors import RequestError
from router.api.embeddings.fields import EmbeddingRequest, PoolingFields, RerankRequest, ScoreRequest
from router.api.embeddings.vectors import cosine, normalised, numbers_of, sigmoid
from router.generation import AnswerChoice, AnswerPlan, Object, Piece, RequestLog, Service


class PooledFrames(ABC):
    """Implements `Frames` for answers that are whole: their requests have no `stream`."""

    def __init__(self, service: Service, fields: PoolingFields, plan: AnswerPlan, log: RequestLog) -> None:
        self.task, self.plan = service.task, plan

    @abstractmethod
    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        """The answer, once every prompt has its vector."""

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


class EmbeddingFrames(PooledFrames):
    """OpenAI's list of embeddings."""

    def __init__(self, service: Service, fields: EmbeddingRequest, plan: AnswerPlan, log: RequestLog) -> None:
        super().__init__(service, fields, plan, log)
        self._dimensions, self._in_base64 = fields.dimensions, fields.encoding_format == "base64"
        cuts = fields.dimensions is not None and fields.dimensions < self.task.width
        self._normalises = (self.task.normalise or cuts) if fields.normalize is None else fields.normalize

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        data = [
            {"object": "embedding", "index": choice.index, "embedding": self._shown(choice.pooled)}
            for choice in self.plan.choices
        ]
        return {"object": "list", "data": data, "model": self.plan.model, "usage": self.usage}

    def _shown(self, values: bytes) -> str | list[float]:
        vector = numbers_of(values)[: self._dimensions]
        vector = normalised(vector) if self._normalises else vector
        return base64.b64encode(vector.tobytes()).decode() if self._in_base64 else vector.tolist()


class ScoringFrames(PooledFrames):
    """Answers that hold a score for each pair of texts."""

    def __init__(
        self, service: Service, fields: ScoreRequest | RerankRequest, plan: AnswerPlan, log: RequestLog
    ) -> None:
        super().__init__(service, fields, plan, log)
        first, second = fields.sides
        self._num_first, self._num_second = len(first), len(second)

    @property
    def scores(self) -> list[float]:
        """Of each pair in turn: what the model's head makes of it, or the cosine of the embeddings of both texts."""
        vectors = [numbers_of(choice.pooled) for choice in self.plan.choices]
        if self.task.name == "score":
            return [sigmoid(number) if self.task.sigmoid else number for (number,) in vectors]
        first, second = vectors[: self._num_first], vectors[self._num_first :]
        return [cosine(first[i if len(first) > 1 else 0], vector) for i, vector in enumerate(second)]

    @property
    def head(self) -> Object:
        return {"id": self.plan.id, "model": self.plan.model}


class ScoreFrames(ScoringFrames):
    """vLLM's list of scores."""

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(self.scores)]
        return {**self.head, "object": "list", "created": self.plan.created, "data": data, "usage": self.usage}


class RerankFrames(ScoringFrames):
    """The best documents first, as Jina and Cohere have them."""

    def __init__(self, service: Service, fields: RerankRequest, plan: AnswerPlan, log: RequestLog) -> None:
        super().__init__(service, fields, plan, log)
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
