from router.api.embeddings.endpoints import EmbeddingSerializer, embedding_routes, plan_embeddings
from router.api.embeddings.fields import EmbeddingRequest, RerankRequest, ScoreRequest

__all__ = [
    "EmbeddingRequest",
    "EmbeddingSerializer",
    "RerankRequest",
    "ScoreRequest",
    "embedding_routes",
    "plan_embeddings",
]
