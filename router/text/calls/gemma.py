"""The tool-call formats of Gemma 4 and of FunctionGemma, with special quotes around strings:

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.answer_grammar import is_special, literal, rule
from router.text.calls.format import (
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
)
from router.text.calls.python_syntax import LEXEMES, MAX_NESTED_LISTS, NotLiteralError, PythonRules
from router.text.calls.pythonic import PythonicScanner
from router.text.calls.scanner import Layout, Pattern, function_name, space
from router.text.calls.tagged import as_json, reader_of, text_lexemes
from router.text.schema import ANY, Case, ObjectShape, Schemas, Shapes, Unenforceable, UnlistedMembers, names_lexeme

PLAIN_NAME = re.compile(r"[a-zA-Z_][\w.$-]*", re.ASCII)
"""Names of members that stand without quotes."""
UNKNOWN_NAME = r"/[a-zA-Z_][a-zA-Z0-9_.$-]*/"
QUOTED_NAME = r"/[^<>]{1,256}/"
WORDS = {"true": True, "false": False, "null": None, "None": None}
"""Templates print a null in a list or an object as `None`."""


class GemmaExtent:
    """Incremental search for the closing brace of a call."""

    def __init__(self, start: int, quote: str) -> None:
        """Start at position `start` of the text, after the opening brace."""
        self._depth, self._position, self._quote, self._in_string = 1, start, quote, False
        self._piece = re.compile(rf"{re.escape(quote)}|[{{}}\[\]]")
        self.complete = False

    def measure(self, text: str) -> int:
        """Return the end of the call's text within `text`, all text so far, including the closing brace."""
        for piece in self._piece.finditer(text, self._position):
            self._position = piece.end()
            if piece[0] == self._quote:
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if piece[0] in "{[" else -1
                if not self._depth:
                    self.complete = True
                    return self._position
        self._position = max(self._position, len(text) - len(self._quote) + 1)
        return len(text)


class GemmaScanner(PythonicScanner):
    """Scanner for calls in this syntax. Emits a call only once it is complete: until then it may be text."""

    def __init__(self, quote: str, functions: Mapping[str, Function], *args: Any, **options: Any) -> None:
        self._quote, self._functions = quote, functions
        super().__init__(*args, **options)

    def _begin_extent(self, start: int) -> GemmaExtent:
        return GemmaExtent(start, self._quote)

    def _read(self, text: str) -> dict[str, Any]:
        found = read_members(text, 0, self._quote)[0]
        function = self._functions.get(self._name)
        return found if function is None else {key: _typed(function, key, value) for key, value in found.items()}


class GemmaFormat(CallFormat):
    """Calls between tags, with members in alphabetical order."""

    name = "gemma4"
    marks: tuple[str, ...] = ("<|tool_call>", "<tool_call|>", '<|"|>')
    reads_schemas = True

    def __init__(self) -> None:
        opened, closed, quote = self.marks
        self.openings = (opened,)
        self.layouts = tuple(  # models sometimes omit the word
            Layout(Pattern(opened, space, word, function_name, "{"), Pattern(), end=closed) for word in ("call:", ":")
        )
        self.rendered_argument = rf"{PROBE_ARGUMENT}:{re.escape(quote)}{PROBE_VALUE}{re.escape(quote)}"

    @property
    def rendered_call(self) -> str:
        return rf"{re.escape(self.marks[0])}\s*call:{PROBE_NAME}\{{"

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> GemmaScanner:
        return GemmaScanner(self.marks[2], functions, self.openings, self.layouts, start=start, only_calls=only_calls)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        opened, closed, quote = map(spell, self.marks)
        before, more = opening(opened)
        rules: dict[str, str] = {}
        bodies = []
        for i, function in enumerate(wanted.functions):
            rules[f"arguments_{i}"] = GemmaRules(
                function.shapes, rules, f"arguments_{i}", quote, self.marks[2]
            ).arguments()
            bodies.append(f"{literal(f'call:{function.name}{{')} arguments_{i} {literal('}')} {closed}")
        rest = "".join([rule(name, each) for name, each in rules.items()]) + rule("body", " | ".join(bodies))
        calls = row(f"{opened} body", "", several=wanted.several)
        return answer_rules(wanted, calls, f"{before} body") + rest + (more if free(wanted) else "")

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        opened, closed, quote = self.marks
        return "".join([f"{opened}call:{name}{_members(given, quote)}{closed}" for name, given in calls])


class FunctionGemmaFormat(GemmaFormat):
    name = "functiongemma"
    marks = ("<start_function_call>", "<end_function_call>", "<escape>")


class GemmaRules(PythonRules):
    """Generator of grammar rules for values in this syntax. `quote` is the right side of a rule for `mark`."""

    def __init__(self, shapes: Shapes, rules: dict[str, str], prefix: str, quote: str, mark: str) -> None:
        super().__init__(shapes, rules, prefix)
        self._quote, self._mark = quote, mark
        self._is_special = is_special(quote)
        text = f"{quote} {self._text('')} {quote}" if self._is_special else self._lexeme("")
        self.lexemes = {
            **LEXEMES,
            "py_string": text,
            "py_boolean": '"true" | "false"',
            "py_null": '"null" | "None"',
            "py_member": f"(py_name | py_string) {literal(':')} py_any",
            "py_name": UNKNOWN_NAME,
        }

    def arguments(self) -> str:
        return self._either([self._object_members(shape) or '""' for shape in self._shapes.root_objects])

    def _text(self, wanted: str) -> str:
        return self._terminal(wanted or f"/{ANY}/")

    def _lexeme(self, wanted: str) -> str:
        """Return the name of a rule for a quoted text as one lexeme, which ends at the first quote."""
        other = f"~(/{ANY}/ {literal(self._mark)} /{ANY}/)"
        text = f"({wanted} & {other})" if wanted else f"/{ANY}/"
        name = self._new_name()
        self._rules[f"{name}[lazy]"] = f"{literal(self._mark)} {text} {literal(self._mark)}"
        return name

    def _string(self, case: Case, bounds: Sequence[Mapping[str, Any]]) -> str:
        wanted = text_lexemes(case)
        if not wanted:
            return self._known("py_string")
        return f"{self._quote} {self._text(wanted)} {self._quote}" if self._is_special else self._lexeme(wanted)

    def _listed(self, value: Any) -> list[str]:
        text = _text_of(value, self._mark)
        if not self._is_special:  # one lexeme, as other strings are
            return [literal(text)]
        parts = text.split(self._mark)
        return [f" {self._quote} ".join([literal(part) if part else "" for part in parts]).strip()]

    def _name(self, name: str) -> str:
        return literal(name) if PLAIN_NAME.fullmatch(name) else self._listed(name)[0]

    def _ordered(self, shape: ObjectShape) -> list[tuple[str, Schemas]]:
        return sorted(shape.named.items(), key=_order)

    def _key(self, kind: UnlistedMembers, taken: Sequence[str]) -> str:
        plain = self._terminal(names_lexeme(UNKNOWN_NAME, kind.patterns, kind.without, taken))
        quoted = names_lexeme(QUOTED_NAME, kind.patterns, kind.without, taken)
        if self._is_special:
            return f"({plain} | {self._quote} {self._terminal(quoted)} {self._quote})"
        return f"({plain} | {self._terminal(f'{literal(self._mark)} ({quoted}) {literal(self._mark)}')})"


def read_members(text: str, position: int, quote: str, depth: int = 0) -> tuple[dict[str, Any], int]:
    """Parse members up to a closing brace, and return them with its position, or the text's end if it is missing.

    A last member whose value is incomplete is omitted. Raises NotLiteralError.
    """
    found: dict[str, Any] = {}
    while True:
        position = _skip(text, position, ", \t\r\n")
        if position == len(text) or text[position] == "}":
            return found, position
        key, position = _name(text, position, quote)
        if position == len(text):
            return found, position
        value, position = _value(text, position + 1, quote, depth + 1)
        if position == len(text):
            return found, position
        found[key] = value


def _name(text: str, position: int, quote: str) -> tuple[str, int]:
    """Read a name. Return it and the position of the colon."""
    if text.startswith(quote, position):
        name, end = _string(text, position, quote)
    else:
        end = next((i for i in range(position, len(text)) if text[i] in ":,{}[]"), len(text))
        name = text[position:end].strip()
    if end < len(text) and text[end] != ":":
        raise NotLiteralError
    return name, end


def _value(text: str, position: int, quote: str, depth: int) -> tuple[Any, int]:
    if depth > MAX_NESTED_LISTS:
        raise NotLiteralError
    position = _skip(text, position, " \t\r\n")
    if text.startswith(quote, position):
        return _string(text, position, quote)
    if text.startswith("{", position):
        members, end = read_members(text, position + 1, quote, depth)
        return members, min(end + 1, len(text))
    if text.startswith("[", position):
        items: list[Any] = []
        position = _skip(text, position + 1, ", \t\r\n")
        while position < len(text) and text[position] != "]":
            item, end = _value(text, position, quote, depth + 1)
            if end == position:  # a closing brace
                raise NotLiteralError
            items.append(item)
            position = _skip(text, end, ", \t\r\n")
        return items, min(position + 1, len(text))
    end = next((i for i in range(position, len(text)) if text[i] in ",{}[]"), len(text))
    return _scalar(text[position:end].strip()), end


def _scalar(text: str) -> Any:
    """Parse a number or a word. Any other text is a string."""
    if text in WORDS:
        return WORDS[text]
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()  # JSON can express an unpaired surrogate, but UTF-8 cannot
    except ValueError:
        return text
    return value if not isinstance(value, float) or math.isfinite(value) else text


def _string(text: str, position: int, quote: str) -> tuple[str, int]:
    end = text.find(quote, position + len(quote))
    if end < 0:
        return "", len(text)
    return text[position + len(quote) : end], end + len(quote)


def _skip(text: str, position: int, chars: str) -> int:
    while position < len(text) and text[position] in chars:
        position += 1
    return position


def _typed(function: Function, key: str, value: Any) -> Any:
    """Convert a string to the type that the schema requires: FunctionGemma's template quotes all values."""
    if not isinstance(value, str):
        return value
    try:
        reader = reader_of(function.shapes, key)
    except Unenforceable:
        return value
    return value if reader is None or reader.may_be_text else json.loads(as_json(value, reader))


def _text_of(value: Any, quote: str) -> str:
    """Write a value, with an object as `{name:value}`."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return _written(value, quote)
    if isinstance(value, list):
        return f"[{','.join([_text_of(item, quote) for item in value])}]"
    return json.dumps(value)


def _members(arguments: str, quote: str) -> str:
    """Convert JSON arguments to members in braces. Encloses anything but an object unchanged."""
    given = read_object(arguments)
    return f"{{{arguments}}}" if given is None else _written(given, quote)


def _written(members: Mapping[str, Any], quote: str) -> str:
    texts = [
        f"{name if PLAIN_NAME.fullmatch(name) else f'{quote}{name}{quote}'}:{_text_of(value, quote)}"
        for name, value in sorted(members.items(), key=_order)
    ]
    return f"{{{','.join(texts)}}}"


def _order(member: tuple[str, Any]) -> str:
    return member[0].lower()
