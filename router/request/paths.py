"""The paths of endpoints that more than one module names."""

from __future__ import annotations

from typing import Final

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"
RESPONSES_PATH: Final = "/v1/responses"
MESSAGES_PATH: Final = "/v1/messages"
INVOCATIONS_PATH: Final = "/invocations"
MODELS_PATH: Final = "/v1/models"
GENERATING: Final = frozenset((CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH, INVOCATIONS_PATH))
"""A POST to one of these asks the model for an answer."""
