"""The form in which models write a call of a function, as models of the Hermes and Qwen families were trained to:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME, ARGUMENTS = '\n{"name": "', '", "arguments": '
END = "}\n" + CLOSE


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
