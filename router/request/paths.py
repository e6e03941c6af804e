"""The paths of endpoints that more than one module names."""

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
MODELS_PATH: Final = "/v1/models"
LOAD_ADAPTER_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER_PATH: Final = "/v1/unload_lora_adapter"
POOLING: Final = frozenset((EMBEDDINGS_PATH, SCORE_PATH, RERANK_PATH))
"""Answers of these are made of prompts alone."""
GENERATING: Final = POOLING | {CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH, INVOCATIONS_PATH}
"""A POST to one of these asks the model for an answer."""
