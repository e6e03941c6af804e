"""From a checked request to the pieces of its answer, for every API."""

from router.generation.adapters import ServedAdapters
from router.generation.answer_frames import Frames, OpenAIFrames, event
from router.generation.choice import AnswerChoice, Piece, TokenWithLogprobs
from router.generation.exchange import KEEP_ALIVE, SEND_GRACE_S, STREAM_HEADERS, Exchange
from router.generation.logprobs import LogprobShapes
from router.generation.model_choice import choose_model
from router.generation.models import Models, ShownModel
from router.generation.origin import Origin
from router.generation.parts import AnswerParts, marks_of
from router.generation.plan import AnswerPlan, PlannedPrompt, check_num_sequences, fit, make_plan, num_prompt_logprobs
from router.generation.request_log import RequestLog
from router.generation.service import Service, ServingClient, key_of, service_of
from router.generation.shape import Object, Shape
from router.generation.structure import answer_grammar, functions_of, tool_calling
from router.generation.token_rules import bad_words, num_kept, truncated
from router.generation.tracing import Tracing

__all__ = [
    "AnswerChoice",
    "AnswerParts",
    "AnswerPlan",
    "Exchange",
    "Frames",
    "KEEP_ALIVE",
    "LogprobShapes",
    "Models",
    "Object",
    "OpenAIFrames",
    "Origin",
    "Piece",
    "PlannedPrompt",
    "RequestLog",
    "SEND_GRACE_S",
    "STREAM_HEADERS",
    "ServedAdapters",
    "Service",
    "ServingClient",
    "Shape",
    "ShownModel",
    "TokenWithLogprobs",
    "Tracing",
    "answer_grammar",
    "bad_words",
    "check_num_sequences",
    "choose_model",
    "event",
    "fit",
    "functions_of",
    "key_of",
    "make_plan",
    "marks_of",
    "num_kept",
    "num_prompt_logprobs",
    "service_of",
    "tool_calling",
    "truncated",
]
