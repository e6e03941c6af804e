"""The tool-call format of GLM-4 before 4.5: a line with the name, and the arguments on the next one:

get_weather
{"city": "Paris"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.answer_grammar import literal
from router.text.calls.format import (
    PROBE_ARGUMENT,
    PROBE_NAME,
    PROBE_VALUE,
    CallFormat,
    Function,
    Message,
    Spell,
    Wanted,
    answer_rules,
    arguments_text,
    bodies,
    free,
    row,
    unmarked,
)
from router.text.calls.scanner import (
    Layout,
    MarkedScanner,
    Missing,
    Pattern,
    exactly,
    function_name,
    one_of,
    peek,
    space,
)
from router.text.parts import Part, first_mark

ROLE = "<|assistant|>"
NAME_END = r"/ ?\n/"
CALL = (function_name, one_of("\n", " \n"), space, peek("{"))


class GLM4Scanner(MarkedScanner):
    """Scanner for calls that begin with a function's name, at the beginning of a line or after the role."""

    _at_line_start = True

    def _text(self, parts: list[Part]) -> bool:
        if self._at_line_start and any(self._held.startswith(name) for name in self._openings):
            return self._move_to(self._head)
        if self._at_line_start and any(name.startswith(self._held) for name in self._openings):
            return False
        position, mark = first_mark(self._held, ("\n", ROLE))
        self._at_line_start = mark == "\n"
        self._emit_text(position + self._at_line_start, parts)
        return bool(mark) and bool(self._held) and (self._at_line_start or self._move_to(self._head))

    def _head(self, parts: list[Part]) -> bool:
        begun = self._held
        is_read = super()._head(parts)
        if self._held != begun and self._step == self._text:
            self._at_line_start = False
        return is_read

    def _gap(self, parts: list[Part]) -> bool:
        self._at_line_start = True
        return super()._gap(parts)


def _next_call(text: str, position: int) -> int | Missing:
    """Match white space, with or without the role that precedes a further call."""
    end = space(text, position)
    if isinstance(end, Missing):
        return end
    role = exactly(ROLE)(text, end)
    return end if role is Missing.NEVER else role


class GLM4Format(CallFormat):
    """A name and a JSON object, without delimiters. Templates render calls as messages with `metadata`."""

    name = "glm4"
    is_unmarked = True
    marks = (ROLE,)
    layouts = tuple(
        Layout(Pattern(*begin, *CALL), Pattern(), Pattern(_next_call, *CALL)) for begin in ((), (ROLE, space))
    )
    rendered_call = rf"{PROBE_NAME} ?\n\{{"
    rendered_argument = rf'"{PROBE_ARGUMENT}": "{PROBE_VALUE}"'
    hints = ("可用工具",)

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> GLM4Scanner:
        return GLM4Scanner(tuple(functions), self.layouts, start=start, only_calls=only_calls, names=functions)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        rules = bodies(wanted.functions, lambda function, given: f"{literal(function.name)} {NAME_END} {given}")
        between = f"({literal(chr(10))} | {spell(ROLE)})"
        if not free(wanted):
            return answer_rules(wanted, row("body", between, several=wanted.several), "") + rules
        more = f"({between} body)*" if wanted.several else ""
        begun, heads = unmarked(wanted.functions, lambda name: rf"/((.|\n)*\n)?{re.escape(name)} ?\n/", more)
        return answer_rules(wanted, "", begun) + heads + rules

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join([f"{name}\n{arguments}" for name, arguments in calls])

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert each call to a message with its name as `metadata`, and results to observations."""
        changed: list[dict[str, Any]] = []
        for message in messages:
            calls = message.get("tool_calls") or ()
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            if message["role"] == "tool":
                plain["role"] = "observation"
            if not calls or message.get("content"):
                changed.append(plain)
            for call in calls:
                function = call["function"]
                text = arguments_text(function)
                changed.append({"role": "assistant", "metadata": function["name"], "content": text})
        return changed
