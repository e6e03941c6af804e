from router.generation.answer_serializer import Object, OpenAISerializer, event
from router.generation.call import GenerationCall, generation_call
from router.generation.chat_plan import chat_of, conversation_tokens, plan_chat, plan_translated
from router.generation.choice import AnswerChoice, Piece, TokenWithLogprobs
from router.generation.completion_plan import plan_completion
from router.generation.context import RequestContext
from router.generation.generation_response import (
    KEEP_ALIVE,
    SEND_GRACE_S,
    STREAM_HEADERS,
    GenerationResponse,
    StreamFormat,
)
from router.generation.logprobs import LogprobFormatter
from router.generation.models import LoadState, ModelLoader, Models, ShownModel
from router.generation.parts import AnswerParts, arguments_of
from router.generation.plan import (
    AnswerPlan,
    PlannedPrompt,
    make_plan,
)
from router.generation.request_history import ChoiceHistory, RequestHistory, RequestHistoryEntry
from router.generation.request_log import RequestLog
from router.generation.router_state import RouterState, key_of, router_state_of
from router.generation.served_model import ServedModel, ServingClient
from router.generation.structure import functions_of, tool_calling
from router.generation.tracing import Tracing

__all__ = [
    "AnswerChoice",
    "AnswerParts",
    "AnswerPlan",
    "ChoiceHistory",
    "arguments_of",
    "GenerationResponse",
    "RouterState",
    "GenerationCall",
    "KEEP_ALIVE",
    "LoadState",
    "LogprobFormatter",
    "ModelLoader",
    "Models",
    "Object",
    "OpenAISerializer",
    "Piece",
    "PlannedPrompt",
    "RequestContext",
    "RequestHistory",
    "RequestHistoryEntry",
    "RequestLog",
    "SEND_GRACE_S",
    "STREAM_HEADERS",
    "ServedModel",
    "ServingClient",
    "ShownModel",
    "StreamFormat",
    "TokenWithLogprobs",
    "Tracing",
    "chat_of",
    "conversation_tokens",
    "event",
    "router_state_of",
    "generation_call",
    "functions_of",
    "key_of",
    "make_plan",
    "plan_chat",
    "plan_completion",
    "plan_translated",
    "tool_calling",
]
