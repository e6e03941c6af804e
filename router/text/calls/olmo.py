"""The tool-call format of OLMo 3, in Python syntax, with one call per line:

<function_calls>
get_weather(city="Paris", days=3)
now()
</function_calls>
"""

from __future__ import annotations

from router.text.answer_grammar import literal
from router.text.calls.pythonic import CALL, TaggedPythonicFormat
from router.text.calls.scanner import Layout, Pattern, space

TAG, END_TAG = "<function_calls>", "</function_calls>"


class OlmoFormat(TaggedPythonicFormat):
    name = "olmo3"
    marks = (TAG, END_TAG)
    openings = (TAG,)
    layouts = (Layout(Pattern(TAG, space, *CALL), Pattern(), Pattern(space, *CALL), Pattern(space, END_TAG)),)
    first = last = comma = "\n"
    between = literal("\n")
