"""Paths of endpoints that are used by more than one module."""

from __future__ import annotations

from typing import Final

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"
RESPONSES_PATH: Final = "/v1/responses"
MESSAGES_PATH: Final = "/v1/messages"
INVOCATIONS_PATH: Final = "/invocations"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
SCORE_PATH: Final = "/v1/score"
RERANK_PATH: Final = "/v1/rerank"
OLLAMA: Final = "/api/"
"""Prefix of Ollama's API."""
OLLAMA_CHAT_PATH: Final = "/api/chat"
OLLAMA_GENERATE_PATH: Final = "/api/generate"
OLLAMA_EMBED_PATH: Final = "/api/embed"
OLLAMA_EMBEDDINGS_PATH: Final = "/api/embeddings"
MODELS_PATH: Final = "/v1/models"
LOAD_ADAPTER_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER_PATH: Final = "/v1/unload_lora_adapter"
POOLING: Final = frozenset((EMBEDDINGS_PATH, SCORE_PATH, RERANK_PATH, OLLAMA_EMBED_PATH, OLLAMA_EMBEDDINGS_PATH))
"""Endpoints whose answers are computed from prompts only, without generation."""
GENERATING: Final = POOLING | {
    *(CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH, INVOCATIONS_PATH),
    *(OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH),
}
"""Endpoints that run the model on a POST."""
