from router.api.anthropic.answers import AnthropicErrorBody
from router.api.anthropic.fields import CountTokensRequest, MessagesRequest
from router.api.anthropic.messages import message_routes

__all__ = [
    "AnthropicErrorBody",
    "CountTokensRequest",
    "MessagesRequest",
    "message_routes",
]
