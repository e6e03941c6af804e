"""The tool-call formats of Llama 4 and, with tags, of Olmo, in Python syntax:

[get_weather(city="Paris", days=3), now()]

<function_calls>
get_weather(city="Paris", days=3)
now()
</function_calls>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

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
    row,
)
from router.text.calls.python_syntax import NotLiteralError, PythonExtent, PythonRules, python_keywords, read_arguments
from router.text.calls.scanner import BLANKS, Found, Layout, MarkedScanner, Pattern, function_name, space
from router.text.parts import CallPart, Part

TAG, END_TAG = "<function_calls>", "</function_calls>"
START, END = "<|python_start|>", "<|python_end|>"
CALL = (function_name, "(")
MORE, CLOSE = Pattern(space, ",", space, *CALL), Pattern(space, "]")
LAYOUTS = (
    Layout(Pattern("[", space, *CALL), Pattern(), MORE, CLOSE),
    Layout(Pattern(START, space, "[", space, *CALL), Pattern(), MORE, CLOSE),
    Layout(Pattern(TAG, space, *CALL), Pattern(), Pattern(space, *CALL), Pattern(space, END_TAG)),
)


class PythonicScanner(MarkedScanner):
    """Scanner for calls in Python syntax. Emits a call only once it is complete: until then it may be text."""

    _is_cut = False
    _name, _begun, _extent_of_call = "", 0, PythonExtent(0)
    """Function of the current call, and the position and extent of its arguments in the held text."""

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
            arguments, _ = read_arguments(self._held[self._begun :])
        except NotLiteralError:
            self._emit_text(len(self._held), parts)
            return
        self._is_cut = True
        parts.append(CallPart(self.num_calls, self._name, _json(arguments)[:-1] if arguments else ""))
        self.num_calls += 1

    def _call(self, found: Found, parts: list[Part]) -> bool:
        self._name, self._begun, self._extent_of_call = found.name, found.end, PythonExtent(found.end)
        return self._move_to(self._arguments)

    def _arguments(self, parts: list[Part]) -> bool:
        length = self._extent_of_call.measure(self._held)
        if not self._extent_of_call.complete:
            return False
        try:
            arguments, _ = read_arguments(self._held[self._begun : length])
        except NotLiteralError:
            self._emit_text(1, parts)
            return self._move_to(self._text)
        parts.append(CallPart(self.num_calls, self._name, _json(arguments)))
        self.num_calls += 1
        return self._move_to(self._between, length)

    def _gap(self, parts: list[Part]) -> bool:
        held = self._held.lstrip()
        if held and END.startswith(held) and held != END:
            return False
        self._held = held.removeprefix(END)
        return super()._gap(parts)


class PythonicFormat(CallFormat):
    """Calls in Python syntax: a list, or with `tagged` one call per line between tags."""

    name = "pythonic"
    marks = (START, END, TAG, END_TAG)
    rendered_argument = rf"{PROBE_ARGUMENT}=[\"']{PROBE_VALUE}[\"']"

    def __init__(self, *, tagged: bool = False) -> None:
        self.tagged = tagged

    @property
    def rendered_call(self) -> str:
        return rf"{TAG}\s*{PROBE_NAME}\(" if self.tagged else rf"\[{PROBE_NAME}\("

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> PythonicScanner:
        return PythonicScanner(("[", START, TAG), LAYOUTS, start=start, only_calls=only_calls, names=functions)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        rules: dict[str, str] = {}
        names = [(f"arguments_{i}", function.name) for i, function in enumerate(wanted.functions)]
        for (arguments, _), function in zip(names, wanted.functions, strict=True):
            rules[arguments] = PythonRules(function.shapes, rules, arguments).arguments()
        rest = "".join([rule(name, expression) for name, expression in rules.items()])
        called = " | ".join(f"{literal(name + '(')} {arguments} {literal(')')}" for arguments, name in names)
        rest += rule("call", called)
        if self.tagged:
            before, more = opening(spell(TAG))
            listed = f"{BREAK} {row('call', literal(chr(10)), several=wanted.several)} {BREAK}"
            listed += f" {spell(END_TAG)}"
            rest += more if free(wanted) else ""
            return answer_rules(wanted, f"{spell(TAG)} {listed}", f"{before} {listed}") + rest
        calls = f"{literal('[')} {row('call', '/, ?/', several=wanted.several)} {literal(']')}"
        if not free(wanted):
            return answer_rules(wanted, calls, "") + rest
        more = " (/, ?/ call)*" if wanted.several else ""
        begun = [f"open_{i} {arguments} {literal(')')}{more} {literal(']')}" for i, (arguments, _) in enumerate(names)]
        for i, (_, name) in enumerate(names):
            rest += rule(f"open_{i}[lazy]", rf"TEXT /\[{BLANKS}{name.replace('.', chr(92) + '.')}\(/")
        return answer_rules(wanted, "", " | ".join(begun)) + rest

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = [f"{name}({_keywords(arguments)})" for name, arguments in calls]
        return f"{TAG}\n{chr(10).join(texts)}\n{END_TAG}" if self.tagged else f"[{', '.join(texts)}]"


def _json(arguments: dict[str, object]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _keywords(arguments: str) -> str:
    """Convert JSON arguments to keyword arguments. Returns anything but an object unchanged."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return python_keywords(given) if isinstance(given, dict) else arguments
