from router.text.answer_grammar import ANY_OBJECT
from router.text.content_stops import ContentStops
from router.text.detokenizer import Detokenizer
from router.text.fill_in_middle import middle_form
from router.text.grammar_writer import CallsDemand, ChoiceDemand, Demand, JsonDemand, RegexDemand, RulesDemand
from router.text.json_values import MAX_NUMBERS, VALUE_BYTES, ValueCounter
from router.text.parts import CallPart, Part, TextPart, ThoughtPart, joined
from router.text.stop_strings import StopScanner
from router.text.text_pipeline import TextPipeline
from router.text.text_threads import MAX_PENDING, SHORT_TEXT, TextThreads
from router.text.thinking import (
    CLOSE,
    OPEN,
    TAIL_TOKENS,
    ThinkingScanner,
    ThoughtTokens,
    begins_inside,
    open_thought,
    thinks,
)

__all__ = [
    "ANY_OBJECT",
    "CLOSE",
    "CallPart",
    "CallsDemand",
    "ChoiceDemand",
    "ContentStops",
    "Demand",
    "Detokenizer",
    "JsonDemand",
    "MAX_NUMBERS",
    "MAX_PENDING",
    "OPEN",
    "Part",
    "RegexDemand",
    "RulesDemand",
    "SHORT_TEXT",
    "StopScanner",
    "TAIL_TOKENS",
    "TextPart",
    "TextPipeline",
    "TextThreads",
    "ThinkingScanner",
    "ThoughtPart",
    "ThoughtTokens",
    "VALUE_BYTES",
    "ValueCounter",
    "begins_inside",
    "joined",
    "middle_form",
    "open_thought",
    "thinks",
]
