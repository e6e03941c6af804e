"""Anthropic's messages."""

from router.api.anthropic.answers import AnthropicErrorBody
from router.api.anthropic.fields import CountTokensRequest, MessagesRequest

__all__ = [
    "AnthropicErrorBody",
    "CountTokensRequest",
    "MessagesRequest",
]
