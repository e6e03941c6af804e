from router.api.ollama.answers import OllamaError
from router.api.ollama.fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaPullRequest,
)
from router.api.ollama.generate import ollama_generate_routes
from router.api.ollama.models import ollama_model_routes

__all__ = [
    "OllamaChatRequest",
    "OllamaEmbedRequest",
    "OllamaEmbeddingsRequest",
    "OllamaError",
    "OllamaGenerateRequest",
    "OllamaModelRequest",
    "OllamaPullRequest",
    "ollama_generate_routes",
    "ollama_model_routes",
]
