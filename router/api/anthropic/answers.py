"""Response bodies of Anthropic's API, for the OpenAPI schema only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class AnthropicBlock(BaseModel):
    type: Literal["text", "tool_use", "thinking"]
    thinking: str | None = None
    signature: str | None = None
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AnthropicUsage(BaseModel):
    """`input_tokens` counts prompt tokens that were not read from a prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicError(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorBody(BaseModel):
    type: Literal["error"]
    error: AnthropicError


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicModel(BaseModel):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int | None
    capabilities: dict[str, Any] | None
    deprecated_at: str | None
    retires_at: str | None
    line: str | None


class AnthropicModelList(BaseModel):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
