"""The tool-call formats of Cohere's Command A and R7B, and with `fenced`, of Command R and R+:

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
]<|END_ACTION|>

Action:
```json
[
    {"tool_name": "get_weather", "parameters": {"city": "Paris"}}
]```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from router.text.calls.format import Message
from router.text.calls.json_calls import JSONFormat, JSONSyntax

ACTION = JSONSyntax(
    (("<|START_ACTION|>",), "<|END_ACTION|>"),
    is_list=True,
    name_key="tool_name",
    argument_keys=("parameters",),
    id_key="tool_call_id",
    gaps=("", "\n    ", "\n"),
)
FENCED = replace(
    ACTION,
    delimiters=(("Action:\n```json",), "```"),
    others=((("Action:", "```json"), "```"),),
    id_key="",
    gaps=("\n", "\n    ", "\n"),
)


class CommandFormat(JSONFormat):
    """A JSON list, between special tokens or, with `fenced`, in a code block."""

    name = "command"
    silent_marks = (
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        *("<|START_TEXT|>", "<|END_TEXT|>"),
    )

    def __init__(self, *, fenced: bool = False) -> None:
        self.fenced = fenced
        self.syntax = FENCED if fenced else ACTION
        self.hints = ("Write 'Action:'", "Write \\'Action:\\'") if fenced else ()
        super().__init__()

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Name the text before calls as the templates expect it. They omit `content` there."""
        return [
            {**message, "tool_plan": message.get("tool_plan") or message.get("content") or ""}
            if message.get("tool_calls")
            else dict(message)
            for message in messages
        ]
