"""The tool-call format of Solar Open. Calls contain their ids of ten letters and digits:

<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}\
<|tool_call:end|><|calls|>
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from router.text.answer_grammar import literal
from router.text.calls.format import PROBE_NAME, Function, SectionFormat, Spell
from router.text.calls.scanner import Layout, Pattern, call_id, function_name, peek, space

OPEN, CLOSE = "<|tool_calls|>", "<|calls|>"
BEGIN, NAME, ARGUMENTS, END = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"
ID = "[a-zA-Z0-9_-]{1,64}"
CALL = (BEGIN, call_id, NAME, function_name, ARGUMENTS, space, peek("{"))
TAIL, AGAIN, LAST = Pattern(space, END), Pattern(space, *CALL), Pattern(space, CLOSE)
HEADS = (f"<|end|><|begin|>assistant{OPEN}", f"assistant{OPEN}")
"""Header of calls that follow reasoning or text, with and without its tokens."""


class SolarFormat(SectionFormat):
    name = "solar"
    silent_marks = ("<|begin|>", "<|think|>", "<|content|>", "<|end|>")
    marks = (OPEN, CLOSE, BEGIN, NAME, ARGUMENTS, END)
    openings = (*HEADS, OPEN, BEGIN)
    layouts = (
        *(Layout(Pattern(begin, space, *CALL), TAIL, AGAIN, LAST) for begin in (*HEADS, OPEN)),
        Layout(Pattern(*CALL), TAIL, AGAIN, LAST),
    )
    rendered_call = rf"<\|tool_call:begin\|>\w+<\|tool_call:name\|>{PROBE_NAME}<\|tool_call:args\|>"

    def body(self, function: Function, arguments: str, spell: Spell) -> str:
        named = f"{spell(BEGIN)} /{ID}/ {spell(NAME)} {literal(function.name)}"
        return f"{named} {spell(ARGUMENTS)} {arguments} {spell(END)}"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = []
        for i, (name, given) in enumerate(calls):
            number = hashlib.sha256(f"{i} {name} {given}".encode()).hexdigest()[:10]
            texts.append(f"{BEGIN}{number}{NAME}{name}{ARGUMENTS}{given}{END}")
        return f"{OPEN}{''.join(texts)}{CLOSE}"
