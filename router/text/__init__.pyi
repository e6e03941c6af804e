from router.text.answer_grammar import ANY_OBJECT
from router.text.content_stops import ContentStops
from router.text.detokenizer import Detokenizer
from router.text.fill_in_middle import middle_form
from router.text.grammar_writer import CallsDemand, ChoiceDemand, Demand, JsonDemand, RegexDemand, RulesDemand
from router.text.json_values import MAX_NUMBERS, VALUE_BYTES, ValueCounter
from router.text.parts import CallPart, Part, TextPart, ThoughtPart, joined
from router.text.prelude import Prelude, thought_prelude
from router.text.stop_strings import StopScanner
from router.text.text_pipeline import TextPipeline
from router.text.text_threads import MAX_PENDING, SHORT_TEXT, TextThreads
from router.text.thinking import ThinkingScanner, ThoughtPosition, ThoughtTokens
from router.text.thought_marks import ThoughtMarks, marks_in

__all__ = [
    "ANY_OBJECT",
    "CallPart",
    "CallsDemand",
    "ChoiceDemand",
    "ContentStops",
    "Demand",
    "Detokenizer",
    "JsonDemand",
    "MAX_NUMBERS",
    "MAX_PENDING",
    "Part",
    "Prelude",
    "RegexDemand",
    "RulesDemand",
    "SHORT_TEXT",
    "StopScanner",
    "TextPart",
    "TextPipeline",
    "TextThreads",
    "ThinkingScanner",
    "ThoughtMarks",
    "ThoughtPart",
    "ThoughtPosition",
    "ThoughtTokens",
    "VALUE_BYTES",
    "ValueCounter",
    "joined",
    "marks_in",
    "middle_form",
    "thought_prelude",
]
