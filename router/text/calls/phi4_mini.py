"""The two tool-call formats of Phi-4-mini, that of its tokenizer's special tokens last:

functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
"""

from __future__ import annotations

from router.text.calls.json_calls import Delimiters, JSONFormat, JSONSyntax

TAGS: Delimiters = (("<|tool_call|>",), "<|/tool_call|>")
FUNCTOOLS: Delimiters = (("functools",), "")


class Phi4MiniFormat(JSONFormat):
    """A JSON list, with `functools` after this word, otherwise between tags."""

    name = "phi4-mini"

    def __init__(self, *, functools: bool = False) -> None:
        self.functools = functools
        written, other = (FUNCTOOLS, TAGS) if functools else (TAGS, FUNCTOOLS)
        self.syntax = JSONSyntax(written, (other,), is_list=True)
        self.hints = ("functools[",) if functools else ("<|/tool|>",)
        super().__init__()
