"""Response bodies of the embedding, score and rerank endpoints, for the OpenAPI schema only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class PromptUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(BaseModel):
    """`embedding` is a list of numbers, or with `encoding_format: base64` base64 of little-endian float32 values."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: PromptUsage


class Score(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    """`index` is the position of the document in the request."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(BaseModel):
    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]
