"""Arguments in Python syntax: an incremental parser for literals, and grammar rules from a schema.

Nothing is evaluated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from router.text.answer_grammar import document_expression, literal
from router.text.schema import ArrayShape, Case, Document, ObjectShape, Schemas, Shapes, UnlistedMembers, names_lexeme

MAX_NESTED_LISTS = 64
"""Maximum nesting depth of lists and dictionaries, which protects the stack."""
ARGUMENT = re.compile(r"\s*([^\s=(),\"'\[\]{}]+)\s*=\s*")
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
EXPONENT = re.compile(r"[eE][+-]?")
WORD = re.compile(r"[A-Za-z]+")
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
ESCAPED = {
    **{"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"},
    **{"\\": "\\", "'": "'", '"': '"', "\n": ""},
}
OCTAL = frozenset("01234567")
QUOTES = ('"""', "'''", '"', "'")
COMMA = "/, ?/"
COLON = "/: ?/"
IDENTIFIER = re.compile(r"[^\W\d][\w.$-]*")
UNKNOWN_KEYWORD = r"/[a-zA-Z_][a-zA-Z0-9_.$-]*/"
"""Keyword names that the schema does not list."""
ESCAPES = (
    r"\\[\"'\\nrtbf]|\\x[0-9a-fA-F]{2}|\\u([0-9a-cA-CeEfF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"  # no surrogates
)
LEXEMES = {
    "py_string": " | ".join([rf"/{quote}([^{quote}\\\x00-\x09\x0b-\x1f]|{ESCAPES})*{quote}/" for quote in ('"', "'")]),
    "py_integer": r"/-?(0|[1-9][0-9]{0,18})/",
    "py_number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
    "py_boolean": '"True" | "False" | "true" | "false"',
    "py_null": '"None" | "null"',
    "py_array": f'"[" (py_any ({COMMA} py_any)*)? "]"',
    "py_object": f'"{{" (py_member ({COMMA} py_member)*)? "}}"',
    "py_member": f"py_string {COLON} py_any",
    "py_any": "py_string | py_number | py_boolean | py_null | py_array | py_object",
}
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
BOUNDS = {"number": NUMBERS, "string": ("minLength", "maxLength", "pattern", "format")}
"""Schema keywords of scalars. They are enforced as in JSON, because JSON numbers and strings are valid Python."""
QUOTED = r'/"([^"\\\x00-\x1f]|\\["\\nrtbf]|\\x[01][0-9a-fA-F])*"/'
"""Dictionary keys, written so that each has only one spelling."""
UNESCAPED = r'/[^"\\\x00-\x1f]*/'
MAX_ITEMS = 1024
"""Maximum list length that is enforced."""
RULE = re.compile(r"\bpy_[a-z]+")
"""Names of rules in `LEXEMES`."""

ListPart = tuple[str, bool]
"""Right side of a rule for a list item, and whether the item is required."""


class NotLiteralError(Exception):
    """The text is not a list of keyword arguments with literal values."""


class UnfinishedError(Exception):
    """The text ends inside an argument."""


class PythonExtent:
    """Incremental search for the closing parenthesis of a call."""

    def __init__(self, start: int) -> None:
        """Start at position `start` of the text, after the opening parenthesis."""
        self._depth, self._quote, self._position = 1, "", start
        self.complete = False

    def measure(self, text: str) -> int:
        """Return the end of the call's text within `text`, all text so far, including the closing parenthesis."""
        position = self._position
        while position < len(text):
            step = self._in_string(text, position) if self._quote else self._outside(text, position)
            if not step:
                break
            position += step
            if self.complete:
                break
        self._position = position
        return position

    def _in_string(self, text: str, position: int) -> int:
        if text[position] == "\\":
            return 2 if position + 1 < len(text) else 0
        if text.startswith(self._quote, position):
            length, self._quote = len(self._quote), ""
            return length
        return 0 if self._quote.startswith(text[position:]) else 1

    def _outside(self, text: str, position: int) -> int:
        char = text[position]
        if char in "\"'":
            if len(text) - position < 3 and text[position:] == char * (len(text) - position):
                return 0  # may become three quotes
            self._quote = char * 3 if text.startswith(char * 3, position) else char
            return len(self._quote)
        if char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            self.complete = not self._depth
        return 1


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments at the beginning of `text`, up to the closing parenthesis or the end of a truncated call.

    The last argument is omitted if no comma or parenthesis follows, because it may be incomplete. Raises
    NotLiteralError.
    """
    found: dict[str, Any] = {}
    position = _blank(text, 0)
    with suppress(UnfinishedError):
        while not text.startswith(")", position):
            if text.startswith("**", position):
                given, position = _value(text, position + 2, 0)
                if not isinstance(given, dict) or not found.keys().isdisjoint(given):
                    raise NotLiteralError
                position, more = _separator(text, position, ")")
                found |= given
                if not more:
                    break
                continue
            keyword = ARGUMENT.match(text, position)
            if keyword is None:
                if position == len(text) or ARGUMENT.match(text + "=", position):
                    raise UnfinishedError
                raise NotLiteralError
            value, position = _value(text, keyword.end(), 0)
            position, more = _separator(text, position, ")")
            if keyword[1] in found:
                raise NotLiteralError
            found[keyword[1]] = value
            if not more:
                break
    return found


def read_value(text: str) -> Any:
    """Parse the whole of `text` as one value. Raises NotLiteralError."""
    try:
        value, position = _value(text, 0, 0)
    except UnfinishedError as error:
        raise NotLiteralError from error
    if _blank(text, position) < len(text):
        raise NotLiteralError
    return value


def _value(text: str, position: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_NESTED_LISTS:
        raise NotLiteralError
    position = _blank(text, position)
    if position == len(text):
        raise UnfinishedError
    char = text[position]
    if char in "\"'":
        return _string(text, position)
    if char in "[(":
        return _list(text, position + 1, "]" if char == "[" else ")", depth + 1)
    if char == "{":
        return _dict(text, position + 1, depth + 1)
    word = WORD.match(text, position)
    if word is not None:
        if word[0] in WORDS:
            return WORDS[word[0]], word.end()
        if word.end() == len(text):
            raise UnfinishedError
        raise NotLiteralError
    return _number(text, position)


def _number(text: str, position: int) -> tuple[int | float, int]:
    found = NUMBER.match(text, position)
    if found is None:
        raise UnfinishedError if text[position:] in ("+", "-", ".", "+.", "-.") else NotLiteralError
    try:
        value = float(found[0]) if set(found[0]) & set(".eE") else int(found[0])
    except ValueError as error:
        raise NotLiteralError from error
    if isinstance(value, float) and not math.isfinite(value):
        raise NotLiteralError
    if EXPONENT.fullmatch(text, found.end()):
        raise UnfinishedError
    return value, found.end()


def _string(text: str, position: int) -> tuple[str, int]:
    quote = next(quote for quote in QUOTES if text.startswith(quote, position))
    start = end = position + len(quote)
    while not text.startswith(quote, end):
        if end >= len(text):
            raise UnfinishedError
        end += 2 if text[end] == "\\" else 1
    said = ESCAPE.sub(_unescaped, text[start:end])
    try:  # two escapes may form a surrogate pair; a single surrogate is invalid
        return said.encode("utf-16", "surrogatepass").decode("utf-16"), end + len(quote)
    except UnicodeDecodeError as error:
        raise NotLiteralError from error


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code in ESCAPED:
        return ESCAPED[code]
    if code[0] in "xuU" and len(code) > 1:
        if (number := int(code[1:], 16)) > 0x10FFFF:
            raise NotLiteralError
        return chr(number)
    return chr(int(code, 8)) if code[0] in OCTAL else found[0]


def _list(text: str, position: int, end: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    position = _blank(text, position)
    while not text.startswith(end, position):
        item, position = _value(text, position, depth)
        items.append(item)
        position, more = _separator(text, position, end)
        if not more:
            return items, position
    return items, position + 1


def _dict(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    position = _blank(text, position)
    while not text.startswith("}", position):
        if position < len(text) and text[position] not in "\"'":
            raise NotLiteralError
        key, position = _value(text, position, depth)
        position = _blank(text, position)
        if not text.startswith(":", position):
            raise UnfinishedError if position == len(text) else NotLiteralError
        items[key], position = _value(text, position + 1, depth)
        position, more = _separator(text, position, "}")
        if not more:
            return items, position
    return items, position + 1


def _separator(text: str, position: int, end: str) -> tuple[int, bool]:
    """Read the comma or end that follows a value. Return the next position and whether it was a comma."""
    position = _blank(text, position)
    if position == len(text):
        raise UnfinishedError
    if text[position] not in ("," + end):
        raise NotLiteralError
    more = text[position] == ","
    return (_blank(text, position + 1) if more else position + 1), more


def _blank(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


class PythonRules:
    """Generator of grammar rules for values of `shapes`. Adds them to `rules`, with names that begin with `prefix`.

    A subclass for another syntax overrides `lexemes`, and the rules of strings, names and enumerated values.
    """

    lexemes: Mapping[str, str] = LEXEMES

    def __init__(self, shapes: Shapes, rules: dict[str, str], prefix: str) -> None:
        self._shapes, self._rules, self._prefix = shapes, rules, prefix
        self._names: dict[tuple[int, ...], str] = {}
        self._open: set[str] = set()  # rules that are being written and have no references yet
        self._same: dict[str, str] = {}
        self._num_names = 0

    def arguments(self) -> str:
        """Return the right side of a rule for the keyword arguments of a call, in the schema's order.

        Names that are not identifiers follow as `**{"name": value}`. Raises Unenforceable.
        """
        return self._either([self._call(shape) for shape in self._shapes.root_objects])

    def of_cases(self, cases: Sequence[Case], *, without: Collection[str] = ()) -> str:
        """Return the right side of a rule for values of the cases, except those of the types in `without`."""
        found: list[str] = []
        for case in cases:
            if case.values is not None:
                found += [text for value in case.values for text in self._listed(value)]
            else:
                found += [
                    expression for kind in sorted(case.types - {*without}) if (expression := self._typed(kind, case))
                ]
        return self._either(found)

    def _call(self, shape: ObjectShape) -> str:
        keywords = {name: each for name, each in shape.named.items() if IDENTIFIER.fullmatch(name)}
        rest = {name: each for name, each in shape.named.items() if name not in keywords}
        parts = [(f"{literal(f'{n}=')} {self._value(each)}", n in shape.required) for n, each in keywords.items()]
        unnamed = []
        for kind in shape.unnamed:
            name = self._terminal(names_lexeme(UNKNOWN_KEYWORD, kind.patterns, kind.without, shape.taken))
            unnamed.append(f"{name} {literal('=')} {self._value(kind.schemas)}")
        is_open = bool(shape.unnamed) and not shape.least and shape.most is None
        last: list[ListPart] = []
        if rest or is_open:
            required = shape.required & rest.keys()
            others = ObjectShape(rest, required, shape.taken, shape.unnamed if is_open else (), 0, None)
            last = [(f"{literal('**')} {self._object(others)}", bool(required))]
        return self._members(parts, unnamed, shape.least, shape.most, last)

    def _value(self, schemas: Schemas) -> str:
        """Return the name of the rule for a value of these schemas."""
        key = tuple(map(id, schemas))
        if key not in self._names:
            cases = self._shapes.cases(*schemas)
            if any(case.is_any for case in cases):
                return self._known("py_any")
            self._names[key] = name = self._new_name()
            self._open.add(name)
            expression = self.of_cases(cases)
            if name in self._open:
                self._names[key] = self._rule(expression)
            else:  # recursive: part of the value has the same schemas
                self._rules[name] = expression
        self._open.discard(self._names[key])
        return self._names[key]

    def _typed(self, kind: str, case: Case) -> str:
        """Return the right side of a rule for the values of one type, or "" if there are none."""
        if kind in BOUNDS:
            type_name = "integer" if kind == "number" and case.is_whole else kind
            bounds = case.keywords(*BOUNDS[kind])
            if bounds and kind == "string":
                return self._string(case, bounds)
            if not bounds:
                return self._known(f"py_{type_name}")
            return self._scalar(type_name, bounds)
        if kind == "array":
            items = self._shapes.array_shape(case)
            return "" if items is None else self._array(items)
        if kind == "object":
            shapes = self._shapes.object_shapes(case)
            return self._either(list(map(self._object, shapes))) if shapes else ""
        return self._known(f"py_{kind}")

    def _scalar(self, type_name: str, bounds: Sequence[Mapping[str, Any]]) -> str:
        """Return the name of a rule for JSON scalars with keywords, which are valid in this syntax."""
        schema = {"type": type_name, **(bounds[0] if len(bounds) == 1 else {"allOf": bounds})}
        return self._rule(document_expression(Document(schema), lenient=True))

    def _string(self, case: Case, bounds: Sequence[Mapping[str, Any]]) -> str:
        """Return the right side of a rule for strings with the keywords `bounds`."""
        return self._scalar("string", bounds)

    def _listed(self, value: Any) -> list[str]:
        """Return right sides of rules for the spellings of an enumerated value."""
        return list(map(literal, _spellings(value)))

    def _name(self, name: str) -> str:
        """Return the right side of a rule for the name of a listed member."""
        return self._either(self._listed(name))

    def _ordered(self, shape: ObjectShape) -> list[tuple[str, Schemas]]:
        """Return the listed members in the order in which the model writes them."""
        return list(shape.named.items())

    def _array(self, shape: ArrayShape) -> str:
        if shape == ArrayShape((), (), 0, None):
            return self._known("py_array")
        num_first, least = len(shape.first), min(shape.least, MAX_ITEMS)
        most = None if shape.most is None or shape.most > MAX_ITEMS else shape.most
        following = '""'
        if most is None or most > num_first:
            rest = None if most is None else most - num_first
            others = self._value(shape.others)
            if not num_first:
                return self._rule(f'"[" {self._members([], [others], least, rest)} "]"')
            following = _repeated(others, least - num_first, rest)
        for i in reversed(range(num_first)):
            item = f"{COMMA if i else ''} {self._value(shape.first[i])} {following}"
            following = self._rule(item if i < least else f"({item})?")
        return self._rule(f'"[" {following} "]"')

    def _object(self, shape: ObjectShape) -> str:
        if shape == ObjectShape({}, frozenset(), (), (UnlistedMembers((), (), ()),), 0, None):
            return self._known("py_object")
        return self._rule(f'"{{" {self._object_members(shape)} "}}"')

    def _object_members(self, shape: ObjectShape) -> str:
        parts = [
            (f"{self._name(name)} {COLON} {self._value(each)}", name in shape.required)
            for name, each in self._ordered(shape)
        ]
        unnamed = [f"{self._key(kind, shape.taken)} {COLON} {self._value(kind.schemas)}" for kind in shape.unnamed]
        return self._members(parts, unnamed, shape.least, shape.most)

    def _key(self, kind: UnlistedMembers, taken: Sequence[str]) -> str:
        """Return the name of a terminal for quoted names that the schema does not list."""
        if not (kind.patterns or kind.without):
            return self._terminal(names_lexeme(QUOTED, (), (), [python_text(name) for name in taken]))
        plain = names_lexeme(UNESCAPED, kind.patterns, kind.without, taken)
        return self._terminal(f"{literal(chr(34))} ({plain}) {literal(chr(34))}")

    def _members(
        self,
        parts: Sequence[ListPart],
        unnamed: Sequence[str],
        least: int,
        most: int | None,
        last: Sequence[ListPart] = (),
    ) -> str:
        """Return the right side of a rule for `parts`, then `least` to `most` unnamed members, then `last`.

        Built from the end. Each remainder has two rules: one after a comma, one at the beginning of the list.
        """
        following, first = '""', '""'
        for part in reversed(last):
            following, first = self._before(part, following, first)
        if unnamed and most != 0:
            one = self._either(unnamed)
            none = [] if least else [first]
            more = _repeated(one, least - 1, None if most is None else most - 1)
            first = self._rule(" | ".join((f"{one} {more} {following}", *none)))
            following = self._rule(f"{_repeated(one, least, most)} {following}")
        for part in reversed(parts):
            following, first = self._before(part, following, first)
        return first

    def _before(self, part: ListPart, following: str, first: str) -> tuple[str, str]:
        text, is_required = part
        after = f"{COMMA} {text} {following}" + ("" if is_required else f" | {following}")
        begin = f"{text} {following}" + ("" if is_required else f" | {first}")
        return self._rule(after), self._rule(begin)

    def _rule(self, expression: str) -> str:
        """Return the name of a rule for an expression. Equal expressions share one rule."""
        if expression not in self._same:
            self._same[expression] = name = self._new_name()
            self._rules[name] = expression
        return self._same[expression]

    def _terminal(self, expression: str) -> str:
        name = self._new_name().upper()
        self._rules[name] = expression
        return name

    def _new_name(self) -> str:
        self._num_names += 1
        return f"{self._prefix}_p{self._num_names}"

    def _known(self, name: str) -> str:
        if name not in self._rules:
            self._rules[name] = self.lexemes[name]
            for needed in RULE.findall(self.lexemes[name]):
                self._known(needed)
        return name

    @staticmethod
    def _either(expressions: Sequence[str]) -> str:
        return f"({' | '.join(dict.fromkeys(expressions))})"


def python_text(value: Any) -> str:
    """Write a JSON value in Python syntax, with strings in double quotes."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(python_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join([f"{python_text(key)}: {python_text(inner)}" for key, inner in value.items()]) + "}"
    return repr(value)


def python_keywords(arguments: Mapping[str, Any]) -> str:
    """Write arguments as keyword arguments. Names that are not identifiers follow as `**{"name": value}`."""
    texts = [f"{name}={python_text(value)}" for name, value in arguments.items() if IDENTIFIER.fullmatch(name)]
    rest = {name: value for name, value in arguments.items() if not IDENTIFIER.fullmatch(name)}
    return ", ".join([*texts, f"**{python_text(rest)}"] if rest else texts)


def _repeated(item: str, least: int, most: int | None) -> str:
    """Return the right side of a rule for `least` to `most` further list items, each after a comma."""
    return "" if most == 0 else f"({COMMA} {item}){{{max(0, least)},{'' if most is None else most}}}"


def _spellings(value: Any) -> list[str]:
    """Return the spellings of an enumerated value. Some templates print JSON's `true`, `false` and `null`."""
    text = python_text(value)
    if value is None or isinstance(value, bool):
        return [text, json.dumps(value)]
    if isinstance(value, str) and "'" not in value and "\\" not in text:
        return [text, f"'{value}'"]
    return [text]
