"""The tool-call format of Llama 3.2 and 4 in Python syntax, and the base class of formats that write it between tags:

[get_weather(city="Paris", days=3), now()]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from router.text.answer_grammar import literal, rule
from router.text.calls.format import (
    BREAK,
    PROBE_ARGUMENT,
    PROBE_NAME,
    PROBE_VALUE,
    CallFormat,
    Function,
    Spell,
    Wanted,
    answer_rules,
    free,
    opening,
    read_object,
    row,
    text_up_to,
    unmarked,
)
from router.text.calls.python_syntax import (
    COMMA,
    NotLiteralError,
    PythonExtent,
    PythonRules,
    python_keywords,
    read_arguments,
)
from router.text.calls.scanner import Found, Layout, MarkedScanner, Pattern, PatternPart, function_name, space
from router.text.parts import CallPart, Part

START, END = "<|python_start|>", "<|python_end|>"
CALL = (function_name, "(")
MORE, CLOSE = Pattern(space, ",", space, *CALL), Pattern(space, "]")


def list_layout(*opened: str | PatternPart, end: str = "") -> Layout:
    """Return the layout of a list of calls in brackets."""
    return Layout(Pattern(*opened, "[", space, *CALL), Pattern(), MORE, CLOSE, end)


class CallExtent(Protocol):
    """Incremental search for the end of a call. `measure` returns the end within all text so far."""

    complete: bool

    def measure(self, text: str) -> int: ...


class PythonicScanner(MarkedScanner):
    """Scanner for calls in Python syntax. Emits a call only once it is complete: until then it may be text."""

    _is_cut = False
    _name, _begun = "", 0
    """Function of the current call, and the position of its arguments in the held text."""

    _extent_of_call: CallExtent

    def _begin_extent(self, start: int) -> CallExtent:
        """Begin to search for the end of the arguments at `start`."""
        return PythonExtent(start)

    def _read(self, text: str) -> dict[str, Any]:
        """Parse arguments that may be cut off. Raises NotLiteralError."""
        return read_arguments(text)

    @property
    def calls_are_whole(self) -> bool:
        return not self._is_cut

    def flush(self, *, cut: bool) -> list[Part]:
        if self._step != self._arguments:
            return super().flush(cut=cut)
        parts: list[Part] = []
        if cut:
            self._cut_off(parts)
        else:
            self._emit_text(len(self._held), parts)
        self._held = ""
        return parts

    def _cut_off(self, parts: list[Part]) -> None:
        """Return a truncated call with the arguments received so far."""
        try:
            arguments = self._read(self._held[self._begun :])
        except NotLiteralError:
            self._emit_text(len(self._held), parts)
            return
        self._is_cut = True
        parts.append(CallPart(self.num_calls, self._name, _json(arguments)[:-1] if arguments else ""))
        self.num_calls += 1

    def _call(self, found: Found, parts: list[Part]) -> bool:
        self._name, self._begun = found.name, found.end
        self._extent_of_call = self._begin_extent(found.end)
        return self._move_to(self._arguments)

    def _arguments(self, parts: list[Part]) -> bool:
        length = self._extent_of_call.measure(self._held)
        if not self._extent_of_call.complete:
            return False
        try:
            arguments = self._read(self._held[self._begun : length])
        except NotLiteralError:  # calls within it are text too, or nested ones would take quadratic time
            self._emit_text(length, parts)
            return self._move_to(self._text)
        parts.append(CallPart(self.num_calls, self._name, _json(arguments)))
        self.num_calls += 1
        return self._move_to(self._between, length)


class PythonicFormat(CallFormat):
    """Calls in Python syntax as a list without delimiters, or with those of Llama 4."""

    name = "pythonic"
    is_unmarked = True
    marks: tuple[str, ...] = (START, END)
    openings: tuple[str, ...] = ("[", START)
    layouts: Sequence[Layout] = (list_layout(), list_layout(START, space, end=END))
    rendered_argument = rf"{PROBE_ARGUMENT}=[\"']{PROBE_VALUE}[\"']"

    @property
    def rendered_call(self) -> str:
        return rf"(<\|python_start\|>)?\[{PROBE_NAME}\("

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> PythonicScanner:
        return PythonicScanner(self.openings, self.layouts, start=start, only_calls=only_calls, names=functions)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        rules = self._calls(wanted)
        calls = f"{literal('[')} {row('call', COMMA, several=wanted.several)} {literal(']')}"
        if not free(wanted):
            return answer_rules(wanted, calls, "") + rules
        more = f"({COMMA} call)*" if wanted.several else ""
        rest = f"{literal(')')} {more} {literal(']')}"
        begun, heads = unmarked(wanted.functions, lambda name: text_up_to("[", f"{name}("), rest)
        return answer_rules(wanted, "", begun) + heads + rules

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return f"[{', '.join(self._texts(calls))}]"

    @staticmethod
    def _calls(wanted: Wanted) -> str:
        """Write the rule `call`, a call of any function, and the rules that it needs."""
        rules: dict[str, str] = {}
        called = []
        for i, function in enumerate(wanted.functions):
            name = f"arguments_{i}"
            rules[name] = PythonRules(function.shapes, rules, name).arguments()
            called.append(f"{literal(f'{function.name}(')} {name} {literal(')')}")
        return "".join([rule(name, each) for name, each in rules.items()]) + rule("call", " | ".join(called))

    @staticmethod
    def _texts(calls: Sequence[tuple[str, str]]) -> list[str]:
        return [f"{name}({_keywords(arguments)})" for name, arguments in calls]


class TaggedPythonicFormat(PythonicFormat):
    """Base class of formats with calls in Python syntax between the two `marks`.

    `first` and `last` enclose the calls, `comma` separates them as the model writes it, and `between` is the right side
    of a rule for that text.
    """

    is_unmarked = False
    first: ClassVar[str]
    last: ClassVar[str]
    between: ClassVar[str]
    comma: ClassVar[str]

    @property
    def rendered_call(self) -> str:
        return rf"{re.escape(self.marks[0])}\s*{re.escape(self.first.strip())}{PROBE_NAME}\("

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        rules = self._calls(wanted)
        opened, closed = map(spell, self.marks)
        before, more = opening(opened)
        around = [literal(text) if text.strip() else BREAK for text in (self.first, self.last)]
        listed = f"{around[0]} {row('call', self.between, several=wanted.several)} {around[1]} {closed}"
        rules += more if free(wanted) else ""
        return answer_rules(wanted, f"{opened} {listed}", f"{before} {listed}") + rules

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        opened, closed = self.marks
        return f"{opened}{self.first}{self.comma.join(self._texts(calls))}{self.last}{closed}"


def _json(arguments: dict[str, object]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _keywords(arguments: str) -> str:
    """Convert JSON arguments to keyword arguments. Returns anything but an object unchanged."""
    given = read_object(arguments)
    return arguments if given is None else python_keywords(given)
