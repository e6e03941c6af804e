"""The endpoints whose answers are made of prompts alone, which the prefill pool computes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.api.embeddings.answers import EmbeddingList, Ranking, ScoreList
from router.api.embeddings.fields import EmbeddingRequest, RerankRequest, ScoreRequest
from router.api.embeddings.frames import EmbeddingFrames, RerankFrames, ScoreFrames
from router.api.embeddings.plan import plan_embeddings, plan_scores
from router.api.generate import exchange, serve
from router.api.openapi import documented
from router.request import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH

embedding_routes = APIRouter(tags=["generate"])
"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`."""


@embedding_routes.post(EMBEDDINGS_PATH, **documented(EmbeddingRequest, EmbeddingList))
async def embeddings(request: Request) -> Response:
    """Embed texts: one vector for each."""
    return await serve(request, EmbeddingRequest, plan_embeddings, exchange(EmbeddingFrames), "embed")


@embedding_routes.post(SCORE_PATH, **documented(ScoreRequest, ScoreList))
async def score(request: Request) -> Response:
    """Score pairs of texts, in the shape of vLLM's API."""
    return await serve(request, ScoreRequest, plan_scores, exchange(ScoreFrames), "embed", "score")


@embedding_routes.post(RERANK_PATH, **documented(RerankRequest, Ranking))
async def rerank(request: Request) -> Response:
    """Order documents by their scores with a query, in the shape of Jina's and Cohere's APIs."""
    return await serve(request, RerankRequest, plan_scores, exchange(RerankFrames), "embed", "score")
