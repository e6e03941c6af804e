"""Answers of prompts alone: embeddings, and scores of pairs of texts."""

from router.api.embeddings.fields import EmbeddingRequest, RerankRequest, ScoreRequest
from router.api.embeddings.routes import embedding_routes

__all__ = [
    "EmbeddingRequest",
    "RerankRequest",
    "ScoreRequest",
    "embedding_routes",
]
