"""What clients send, and the errors that they get."""

from router.request.adapter_fields import LoadAdapterRequest, UnloadAdapterRequest
from router.request.body import BODY_TIMEOUT_S, LARGE_BYTES, BodyBudget, BodyLease, is_large, parse, read_body
from router.request.content_encoding import encoding_of
from router.request.extensions import (
    COPIED,
    EXTENSIONS,
    MAX_CLASS_CHARS,
    MAX_SALT_CHARS,
    Extensions,
    Fields,
    JsonSchema,
    StopText,
    at_most,
)
from router.request.invocation import Invocation
from router.request.large_body import LargeBodies, check_number_of_ids
from router.request.paths import (
    CHAT_PATH,
    COMPLETION_PATH,
    EMBEDDINGS_PATH,
    GENERATING,
    INVOCATIONS_PATH,
    LOAD_ADAPTER_PATH,
    MESSAGES_PATH,
    MODELS_PATH,
    POOLING,
    RERANK_PATH,
    RESPONSES_PATH,
    SCORE_PATH,
    UNLOAD_ADAPTER_PATH,
)
from router.request.refused import Only, Refused
from router.request.translation import as_content, function_tool, named_as, named_tool, text_content

__all__ = [
    "BODY_TIMEOUT_S",
    "BodyBudget",
    "BodyLease",
    "CHAT_PATH",
    "COMPLETION_PATH",
    "COPIED",
    "EMBEDDINGS_PATH",
    "EXTENSIONS",
    "Extensions",
    "Fields",
    "GENERATING",
    "INVOCATIONS_PATH",
    "Invocation",
    "JsonSchema",
    "LARGE_BYTES",
    "LOAD_ADAPTER_PATH",
    "LargeBodies",
    "LoadAdapterRequest",
    "MAX_CLASS_CHARS",
    "MAX_SALT_CHARS",
    "MESSAGES_PATH",
    "MODELS_PATH",
    "Only",
    "POOLING",
    "RERANK_PATH",
    "RESPONSES_PATH",
    "Refused",
    "SCORE_PATH",
    "StopText",
    "UNLOAD_ADAPTER_PATH",
    "UnloadAdapterRequest",
    "as_content",
    "at_most",
    "check_number_of_ids",
    "encoding_of",
    "function_tool",
    "is_large",
    "named_as",
    "named_tool",
    "parse",
    "read_body",
    "text_content",
]
