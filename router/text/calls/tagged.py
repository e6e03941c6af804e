"""Base class of formats that write each argument as plain text between tags: value parser, scanner and grammar.

Members follow the schema's order. For strings, the grammar enforces enumerations, lengths, patterns and formats that
have a pattern. Other values are JSON or Python literals, for which all supported keywords are enforced.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.answer_grammar import document_expression, is_special, literal, rule
from router.text.calls.format import (
    BREAK,
    PROBE_ARGUMENT,
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
from router.text.calls.python_syntax import NotLiteralError, PythonRules, python_text, read_value
from router.text.calls.scanner import Found, Layout, MarkedScanner, Missing
from router.text.parts import CallPart, Part, overlap
from router.text.schema import (
    ANY,
    TYPES,
    Case,
    Document,
    ObjectShape,
    Schemas,
    Shapes,
    Unenforceable,
    UnlistedMembers,
    names_lexeme,
    searched,
)

MAX_KEY_CHARS = 256
"""Maximum length of an argument's name. A longer one is treated as text."""
UNKNOWN_KEY = r'/[^<>"\n]{1,256}/'
"""Argument names that the schema does not list."""
SCALARS = frozenset(("string", "boolean", "null"))
"""Types whose values are plain text or one of a few words."""
MOST_ENFORCED_CHARS = 4096
"""Maximum string length that is enforced."""
TEXT_ONLY = frozenset({"string"})
AS_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Python constants that models write instead of JSON's."""
STRING, OTHER = 'true">', 'false">'
"""Ends of the opening tags of arguments that are strings, and of others, in formats whose tags state this."""
SPELLINGS = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """Tags of an argument: `open` KEY `key_end`, optional white space, `value` VALUE `close`.

    `lined`: one line break after the opening tag and one before the closing tag are not part of the value. `python`:
    lists and dictionaries may be in Python syntax. `writes_python`: the model writes no other syntax. `typed`: `STRING`
    or `OTHER` follows instead of `value`.
    """

    open: str
    key_end: str
    value: str
    close: str
    lined: bool = False
    python: bool = False
    writes_python: bool = False
    typed: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """Texts of which one precedes the value."""
        return (STRING, OTHER) if self.typed else (self.value,)


def spelled(tag: str, marks: Sequence[str], spell: Spell) -> list[str]:
    """Write a tag in a grammar, split at the first of `marks` in it that is a special token."""
    mark = next((mark for mark in marks if mark in tag and is_special(spell(mark))), None)
    if mark is None:
        return [literal(tag)]
    before, _, after = tag.partition(mark)
    return [*filter(None, (before and literal(before), spell(mark), after and literal(after)))]


class TaggedFormat(CallFormat):
    """Base class of formats with tags around each argument."""

    tags: ArgumentTags
    reads_schemas = True

    @property
    def rendered_argument(self) -> str:  # type: ignore[override]
        value = re.escape(self.tags.values[0])
        return rf"{PROBE_ARGUMENT}{re.escape(self.tags.key_end)}\s*{value}\s*{PROBE_VALUE}"

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> TaggedScanner:
        return TaggedScanner(self.openings, self.layouts, self.tags, functions, start=start, only_calls=only_calls)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        rules = TaggedRules(self.tags, spell, self.marks)
        bodies = []
        for i, function in enumerate(wanted.functions):
            rules.arguments(f"arguments_{i}", function.shapes)
            bodies.append(self.called(function.name, f"arguments_{i}", spell))
        before, more = self.opening(spell)
        rest = rules.text + rule("body", " | ".join(bodies)) + (more if free(wanted) else "")
        calls, one = self.rows(wanted, spell)
        return answer_rules(wanted, calls, f"{before} {one}") + rest

    def opening(self, spell: Spell) -> tuple[str, str]:
        """Return the right side of a rule for text up to a call, and the helper rule that it needs, if any."""
        return opening(spell(self.openings[0]))

    @abstractmethod
    def called(self, name: str, arguments: str, spell: Spell) -> str:
        """Return the right side of the rule `body` for a call of one function."""

    def rows(self, wanted: Wanted, spell: Spell) -> tuple[str, str]:
        """Return right sides of two rules: an answer that consists of calls, and the text after an opening tag.

        By default each call is between the first two marks.
        """
        first, last, *_ = map(spell, self.marks)
        call = f"body {last}"
        return row(f"{first} {call}", BREAK, several=wanted.several), call

    def members(self, arguments: str) -> list[tuple[str, Any, str]]:
        """Return the members of JSON arguments with their values, also as text; empty if they are not an object."""
        given = read_object(arguments) or {}
        return [(key, value, as_text(value, python=self.tags.writes_python)) for key, value in given.items()]


class _ValueEnd:
    """Incremental search for the closing tag of a value. With `quoted`, tags within quotes are ignored."""

    def __init__(self, close: str, *, quoted: bool) -> None:
        self._close, self._quoted = close, quoted
        self._piece = re.compile(rf"\\[\s\S]?|[\"']|{re.escape(close)}")
        self._position, self._quote = 0, ""

    def find(self, text: str) -> int:
        """Return the position of the tag in `text`, the whole value so far, or -1."""
        if not self._quoted:
            found = text.find(self._close, self._position)
            self._position = max(self._position, len(text) - len(self._close) + 1)
            return found
        for piece in self._piece.finditer(text, self._position):
            mark = piece[0]
            if mark == "\\":  # may escape the next character
                return -1
            self._position = piece.end()
            if not self._quote and mark == self._close:
                return piece.start()
            if mark in ("'", '"') and self._quote in ("", mark):
                self._quote = "" if self._quote else mark
        self._position = max(self._position, len(text) - len(self._close) + 1)
        return -1


class TaggedScanner(MarkedScanner):
    """Scanner for tagged arguments. Streams strings as they arrive, and other values once they are complete."""

    def __init__(
        self,
        openings: Sequence[str],
        layouts: Sequence[Layout],
        tags: ArgumentTags,
        functions: Mapping[str, Function],
        *,
        start: int = 0,
        only_calls: bool = False,
    ) -> None:
        self._tags, self._functions = tags, functions
        self._function: Function | None = None
        self._known_keys: list[str] = []  # longest first
        self._keys: set[str] = set()
        self._reader: ValueReader | None = None
        self._end_of_value = _ValueEnd(tags.close, quoted=False)
        self._is_again = self._is_begun = self._is_text = False
        """State of the current argument: whether its name is a repetition, its text has begun, and it is a string."""
        super().__init__(openings, layouts, start=start, only_calls=only_calls)

    @property
    def calls_are_whole(self) -> bool:
        return self._step not in (self._arguments, self._value)

    def _call(self, found: Found, parts: list[Part]) -> bool:
        self._function, self._keys = self._functions.get(found.name), set()
        self._known_keys = self._names_of_arguments()
        return super()._call(found, parts)

    def _arguments(self, parts: list[Part]) -> bool:
        """Read the next argument, or the end of the call."""
        tags, held = self._tags, self._held.lstrip()
        if held.startswith(tags.open):
            return self._key(held, parts)
        if tags.open.startswith(held) or self._layout.tail.read(self._held) is Missing.MORE:
            return False
        self._emit_arguments("}" if self._keys else "{}", parts)
        return self._move_to(self._tail)

    def _key(self, held: str, parts: list[Part]) -> bool:
        """Read from the opening tag of an argument to its value."""
        tags = self._tags
        named = held[len(tags.open) :]
        known = next((key for key in self._known_keys if _may_begin(named, key + tags.key_end)), None)
        if known is not None and len(named) < len(known + tags.key_end):
            return False
        if known is None:
            key, end, rest = named.partition(tags.key_end)
        else:
            key, end, rest = known, tags.key_end, named[len(known + tags.key_end) :]
        rest = rest.lstrip() if tags.value else rest
        begun = next((value for value in tags.values if rest.startswith(value)), None)
        if not end or begun is None:
            may_come = any(value.startswith(rest) for value in tags.values) if end else len(key) <= MAX_KEY_CHARS
            if may_come:
                return False
            self._emit_arguments("}" if self._keys else "{}", parts)
            return self._move_to(self._gap)
        self._is_again, self._is_begun = key in self._keys, False
        self._keys.add(key)
        self._reader = self._reader_of(key)
        reader = self._reader
        if tags.typed and begun == STRING:  # unless the schema accepts no string
            self._is_text = reader is None or reader.may_be_text
        else:
            self._is_text = reader is not None and reader.is_text
        quoted = not self._is_text and (tags.typed or (reader is not None and not reader.may_be_text))
        self._end_of_value = _ValueEnd(tags.close, quoted=quoted)
        if not self._is_again:
            self._emit_arguments(f"{'{' if len(self._keys) == 1 else ', '}{json_string(key)}: ", parts)
        self._held = rest[len(begun) :]
        return self._move_to(self._value)

    def _value(self, parts: list[Part]) -> bool:
        tags = self._tags
        if self._is_text and not self._is_begun:
            if tags.lined and not self._held:
                return False
            self._held = self._held.removeprefix("\n") if tags.lined else self._held
            self._is_begun = True
            self._emit_arguments('"', parts)
        position = self._held.find(tags.close) if self._is_text else self._end_of_value.find(self._held)
        if position < 0:
            return self._more_text(parts)
        text = self._held[:position].removesuffix("\n") if tags.lined else self._held[:position]
        if self._is_begun:
            self._emit_arguments(json_string(text)[1:], parts)
        else:
            self._emit_arguments(
                as_json(text.removeprefix("\n") if tags.lined else text, self._reader, python=tags.python), parts
            )
        return self._move_to(self._arguments, position + len(tags.close))

    def _more_text(self, parts: list[Part]) -> bool:
        """Return the text that cannot be part of the closing tag. Returns False, because the value is incomplete."""
        if self._is_begun:
            tags = self._tags
            ends = (tags.close, f"\n{tags.close}") if tags.lined else (tags.close,)
            length = len(self._held) - max(overlap(self._held, end) for end in ends)
            self._emit_arguments(json_string(self._held[:length])[1:-1], parts)
            self._held = self._held[length:]
        return False

    def _emit_arguments(self, arguments: str, parts: list[Part]) -> None:
        """Return more of the call's arguments, except for a repeated argument."""
        if arguments and not (self._is_again and self._step == self._value):
            parts.append(CallPart(self.num_calls - 1, arguments=arguments))

    def _reader_of(self, key: str) -> ValueReader | None:
        if self._function is None:
            return None
        try:
            return reader_of(self._function.shapes, key)
        except Unenforceable:  # requests that need a grammar for this schema are rejected
            return None

    def _names_of_arguments(self) -> list[str]:
        """Return the names in the function's schema, longest first."""
        if self._function is None:
            return []
        try:
            names = {name for shape in self._function.shapes.root_objects for name in shape.named}
        except Unenforceable:
            return []
        return sorted(names, key=len, reverse=True)


def _may_begin(text: str, begin: str) -> bool:
    """Whether `text`, which may be incomplete, can begin with `begin`."""
    return text.startswith(begin) or begin.startswith(text)


class TaggedRules:
    """Collector of grammar rules. `marks` are tags that may be special tokens; `spell` writes them."""

    def __init__(self, tags: ArgumentTags, spell: Spell, marks: Sequence[str]) -> None:
        self._tags, self._spell, self._marks = tags, spell, marks
        self._rules: dict[str, str] = {}
        self._line = literal("\n") if tags.lined else ""
        self._shapes: Shapes
        self._python: PythonRules
        self._name = ""

    @property
    def text(self) -> str:
        return "".join([rule(name, expression) for name, expression in self._rules.items()])

    def arguments(self, name: str, shapes: Shapes) -> None:
        """Add the rule `name` for the arguments of a call. Raises Unenforceable if nothing matches their schema."""
        self._shapes, self._name = shapes, name
        self._python = PythonRules(shapes, self._rules, name)
        found = [self._object(f"{name}_{i}", shape) for i, shape in enumerate(shapes.root_objects)]
        self._rules[name] = " | ".join(each or '""' for each in found)

    def _object(self, name: str, shape: ObjectShape) -> str:
        parts = []
        for i, (key, schemas) in enumerate(shape.named.items()):
            part = self._argument(literal(key), f"{name}_v{i}", schemas)
            parts.append(part if key in shape.required else f"({part})?")
        unnamed = [self._unnamed(f"{name}_u{i}", kind, shape.taken) for i, kind in enumerate(shape.unnamed)]
        if unnamed:
            most = "" if shape.most is None else shape.most
            parts.append(f"({' | '.join(unnamed)}){{{shape.least},{most}}}")
        return " ".join(parts)

    def _unnamed(self, name: str, kind: UnlistedMembers, taken: Sequence[str]) -> str:
        key = f"{name.upper()}_KEY"
        self._rules[key] = names_lexeme(UNKNOWN_KEY, kind.patterns, kind.without, taken)
        return self._argument(key, name, kind.schemas)

    def _argument(self, key: str, name: str, schemas: Schemas) -> str:
        tags = self._tags
        opened = [*self._spelled(tags.open), key, *self._spelled(tags.key_end)]
        opened += [BREAK, *self._spelled(tags.value)] if tags.value else [self._line]
        self._rules[name] = self._value(name, schemas)
        return " ".join(filter(None, (*opened, name, BREAK)))

    def _value(self, name: str, schemas: Schemas) -> str:
        """Return the right side of a rule for a value and its closing tag. Names of helper rules begin with `name`."""
        cases = self._shapes.cases(*schemas)
        if any(case.is_any for case in cases):
            text = self._kind(self._closed_text("any_text", ""), is_string=True)
            return f"{text} | {literal(OTHER)} {self._any_json()} {self._close}" if self._tags.typed else text
        others = [case for case in cases if case.values is None]
        listed = [(value, text) for case in cases for value in case.values or () for text in self._spellings(value)]
        listed += [(None, text) for text in self._words(others)]
        found = [self._kind(self._closed_literal(text), is_string=isinstance(value, str)) for value, text in listed]
        structured = [case for case in others if not case.types <= SCALARS]
        for i, case in enumerate(case for case in others if "string" in case.types):
            text = self._text(f"{name}_t{i}", case, is_alone=self._tags.typed or not structured)
            found.append(self._kind(text, is_string=True))
        if structured:
            schema = self._shapes.narrowed(structured, frozenset(TYPES) - SCALARS)
            self._rules[f"{name}_json"] = document_expression(self._shapes.document_of(schema), lenient=True)
            found.append(self._kind(f"{name}_json {self._close}", is_string=False))
            if self._tags.python:
                found.append(f"({self._python.of_cases(structured, without=SCALARS)}) {self._close}")
        if not found:
            raise Unenforceable("#", "a value of this schema cannot be written between tags")
        return " | ".join(dict.fromkeys(found))

    def _kind(self, value: str, *, is_string: bool) -> str:
        """Put the end of the opening tag before the right side of a rule for a value, if it depends on the type."""
        return f"{literal(STRING if is_string else OTHER)} {value}" if self._tags.typed else value

    def _any_json(self) -> str:
        """Add a rule for JSON that is not a string. Return its name."""
        types = ["object", "array", "number", "boolean", "null"]
        self._rules["any_json"] = document_expression(Document({"type": types}), lenient=True)
        return "any_json"

    def _words(self, cases: Sequence[Case]) -> list[str]:
        types = frozenset[str]().union(*(case.types for case in cases))
        words = [*([True, False] if "boolean" in types else []), *([None] if "null" in types else [])]
        return [text for word in words for text in self._spellings(word)]

    def _spellings(self, value: Any) -> list[str]:
        """Return the texts of an enumerated value, except those that contain the closing tag."""
        texts = spellings(value, python=self._tags.python)
        return [text for text in texts if not (isinstance(value, str) and self._tags.close in text)]

    def _text(self, name: str, case: Case, *, is_alone: bool) -> str:
        """Return the right side of a rule for a string and its closing tag.

        Unless `is_alone`, the value may have another type that begins with the same characters. llguidance's lexer then
        reads up to the closing tag, so the string and the tag must be one unconstrained lexeme.
        """
        wanted = text_lexemes(case, is_alone=is_alone)
        return self._closed_text(name if wanted else "any_text", wanted)

    def _closed_literal(self, text: str) -> str:
        """Return an enumerated text and its closing tag, as one lexeme if the tag is plain text."""
        if self._special_close:
            return f"{literal(text)} {self._close}"
        return literal(f"{text}{self._line and chr(10)}{self._tags.close}")

    def _closed_text(self, name: str, wanted: str) -> str:
        """Add a rule for a text that matches the lexemes `wanted`, followed by the closing tag. Return its right side.

        The text must not contain the tag, because the scanner would end the value there.
        """
        if first := self._special_close:
            begun = "" if is_special(first) else first  # ends the text, because a special token follows
            self._rules[name.upper()] = f"({wanted or f'/{ANY}/'}) {begun}" if begun else wanted or f"/{ANY}/"
            rest = self._spelled(self._tags.close)[1 if begun else 0 :]
            return " ".join(filter(None, (name.upper(), self._line, *rest)))
        close = literal(f"{chr(10) if self._line else ''}{self._tags.close}")
        other = f"~(/{ANY}/ {literal(self._tags.close)} /{ANY}/)"  # includes bytes that are special tokens
        if not wanted and not self._line:  # a lazy lexeme ends at the first tag
            self._rules[f"{name}[lazy]"] = f"/{ANY}/ {close}"
        else:
            self._rules[f"{name}[lazy]"] = f"({wanted or f'/{ANY}/'} & {other}) {close}"
        return name

    @property
    def _close(self) -> str:
        return " ".join(filter(None, (self._line, *self._spelled(self._tags.close))))

    @property
    def _special_close(self) -> str:
        """The first part of the closing tag if it has a special token, otherwise ""."""
        parts = self._spelled(self._tags.close)
        return parts[0] if any(map(is_special, parts)) else ""

    def _spelled(self, tag: str) -> list[str]:
        return spelled(tag, self._marks, self._spell)


def text_lexemes(case: Case, *, is_alone: bool = True) -> str:
    """Return the lexemes that a string matches, joined by `&`. Only the maximum length unless `is_alone`."""
    least, most = int(case.most("minLength") or 0) if is_alone else 0, case.least("maxLength")
    wanted = []
    if is_alone:
        wanted = [lexeme for each in case.keywords("pattern") if (lexeme := searched(each["pattern"]))]
    if least or (most is not None and most <= MOST_ENFORCED_CHARS):
        least = min(least, MOST_ENFORCED_CHARS)
        wanted.append(f"/[\\s\\S]{{{least},{'' if most is None or most > MOST_ENFORCED_CHARS else int(most)}}}/")
    return " & ".join(wanted)


@dataclass(frozen=True, slots=True)
class ValueReader:
    """Parser for the texts of one argument. Values must match all schemas of one of the `alternatives`."""

    shapes: Shapes
    alternatives: Sequence[Schemas]
    types: frozenset[str]

    @property
    def is_text(self) -> bool:
        """Whether every value is a string."""
        return self.types == TEXT_ONLY

    @property
    def may_be_text(self) -> bool:
        return "string" in self.types

    def accepts(self, value: Any) -> bool:
        return self.shapes.accepts(value, *self.alternatives)


def reader_of(shapes: Shapes, name: str) -> ValueReader | None:
    """Return the reader of an argument, or None if the schema does not constrain its value."""
    alternatives = shapes.members(name)
    cases = [case for schemas in alternatives for case in shapes.cases(*schemas)]
    if not cases or any(case.is_any for case in cases):
        return None
    return ValueReader(shapes, alternatives, frozenset[str]().union(*(case.types for case in cases)))


def as_json(text: str, reader: ValueReader | None, *, python: bool = False) -> str:
    """Convert a model's text for a value to JSON. The result is a string unless the schema accepts another type.

    With `python`, lists and dictionaries may be in Python syntax.
    """
    if reader is not None and reader.is_text:
        return json_string(text)
    try:
        value = _read(text, python)
        made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        made.encode()  # JSON can express an unpaired surrogate, but UTF-8 cannot
        is_text = isinstance(value, str) or (reader is not None and reader.may_be_text and not reader.accepts(value))
    except (ValueError, RecursionError, NotLiteralError):
        return json_string(text)
    return json_string(text) if is_text else made


def spellings(value: Any, *, python: bool = False) -> list[str]:
    """Return the spellings of a JSON value. Strings have one, null also `None`, and so on."""
    if isinstance(value, str):
        return [value]
    if value is None or isinstance(value, bool):
        return list(SPELLINGS[value])
    texts = [json.dumps(value, ensure_ascii=False)]
    return [*texts, python_text(value)] if python else texts


def as_text(value: Any, *, python: bool = False) -> str:
    """Write a value as text, in JSON or Python syntax."""
    return spellings(value, python=python)[-1 if python else 0]


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read(text: str, python: bool) -> Any:
    try:
        return json.loads(AS_PYTHON.get(text.strip(), text), parse_constant=_no_number)
    except ValueError:
        if not python or text.lstrip()[:1] not in ("[", "{"):
            raise
        return read_value(text)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
