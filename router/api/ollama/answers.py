"""Response bodies of Ollama's API, for the OpenAPI schema only. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class OllamaError(BaseModel):
    error: str


class OllamaFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(BaseModel):
    id: str
    function: OllamaFunction


class OllamaMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaAnswer(BaseModel):
    """An answer, or a line of its stream. The numbers and `done_reason` are in the last line only."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatAnswer(OllamaAnswer):
    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: str | None = None


class OllamaEmbeddings(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(BaseModel):
    embedding: list[float]


class OllamaDetails(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    """`state`: only of a model that is loaded on demand. Its details are empty until it has been used."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    state: Literal["idle", "loading", "loaded"] | None = None


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(BaseModel):
    models: list[OllamaRunningModel]


class OllamaModelFacts(BaseModel):
    modified_at: str
    template: str
    parameters: str
    modelfile: str
    license: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaProgress(BaseModel):
    """A line of the progress of a download. `total` and `completed` are in bytes."""

    status: str
    total: int | None = None
    completed: int | None = None
    error: str | None = None


class OllamaVersion(BaseModel):
    version: str
