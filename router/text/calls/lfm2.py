"""The tool-call format of LFM2, in Python syntax:

<|tool_call_start|>[get_weather(city="Paris", days=3), now()]<|tool_call_end|>
"""

from __future__ import annotations

from router.text.calls.python_syntax import COMMA
from router.text.calls.pythonic import TaggedPythonicFormat, list_layout
from router.text.calls.scanner import space

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class LFM2Format(TaggedPythonicFormat):
    name = "lfm2"
    marks = (OPEN, CLOSE)
    openings = (OPEN,)
    layouts = (list_layout(OPEN, space, end=CLOSE),)
    hints = ("<|tool_list_start|>", "List of tools: [")
    first, last, comma = "[", "]", ", "
    between = COMMA
