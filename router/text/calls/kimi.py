"""The tool-call format of Kimi K2. Calls contain their ids, numbered from 0 in a conversation:

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}\
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.text.answer_grammar import literal
from router.text.calls.format import PROBE_CALL_ID, PROBE_NAME, Function, Message, SectionFormat, Spell
from router.text.calls.scanner import Layout, Pattern, call_id, function_name, peek, space

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."
ID = (function_name, ":", call_id, space, ARGUMENTS, space, peek("{"))
TAIL, LAST = Pattern(space, END), Pattern(space, CLOSE)
LAYOUTS = [
    Layout(Pattern(*first, *call), TAIL, Pattern(space, *call), LAST)
    for call in ((BEGIN, space, PREFIX, *ID), (BEGIN, space, *ID))
    for first in ((OPEN, space), ())
]


class KimiFormat(SectionFormat):
    name = "kimi"
    marks = (OPEN, CLOSE, BEGIN, ARGUMENTS, END)
    openings = (OPEN, BEGIN)
    layouts = LAYOUTS
    hints = (OPEN,)
    rendered_call = rf"<\|tool_call_begin\|>(functions\.{PROBE_NAME}:0|{PROBE_CALL_ID})<\|tool_call_argument_begin\|>"

    def body(self, function: Function, arguments: str, spell: Spell) -> str:
        head = f"{spell(BEGIN)} {literal(f'{PREFIX}{function.name}:')} /[0-9]{{1,3}}/"
        return f"{head} {spell(ARGUMENTS)} {arguments} {spell(END)}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = [f"{BEGIN}{PREFIX}{name}:{i}{ARGUMENTS}{given}{END}" for i, (name, given) in enumerate(calls)]
        return f"{OPEN}{''.join(texts)}{CLOSE}"

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Replace call ids with ids in the model's form, because the template renders them instead of names."""
        ids: dict[str, str] = {}
        changed = []
        for message in messages:
            made = dict(message)
            if message.get("tool_calls"):
                calls = []
                for call in message["tool_calls"]:
                    call_id = f"{PREFIX}{call['function']['name']}:{len(ids)}"
                    ids[str(call.get("id") or call_id)] = call_id
                    calls.append({**call, "id": call_id})
                made["tool_calls"] = calls
            if isinstance(message.get("tool_call_id"), str):
                made["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
            changed.append(made)
        return changed
