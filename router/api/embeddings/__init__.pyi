from router.api.embeddings.endpoints import embedding_routes
from router.api.embeddings.fields import EmbeddingRequest, RerankRequest, ScoreRequest

__all__ = [
    "EmbeddingRequest",
    "RerankRequest",
    "ScoreRequest",
    "embedding_routes",
]
