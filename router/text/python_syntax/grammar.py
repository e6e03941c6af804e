"""Grammar rules for arguments in Python's syntax, from their JSON schema.

Types, members, enumerations, references, alternatives, bounds of numbers, lengths, patterns and formats of texts and
numbers of items are enforced, and the other keywords of JSON Schema are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.answer.closed_schema import target_of
from router.text.answer.grammar import json_expression, literal, rule

COMMA = "/, ?/"
KEYWORD = re.compile(r"[^\W\d][\w.$-]*")
ESCAPES = (
    r"\\[\"'\\nrtbf]|\\x[0-9a-fA-F]{2}|\\u([0-9a-cA-CeEfF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"  # no surrogates
)
LEXEMES = {
    "py_string": " | ".join([rf"/{quote}([^{quote}\\\x00-\x1f]|{ESCAPES})*{quote}/" for quote in ('"', "'")]),
    "py_integer": r"/-?(0|[1-9][0-9]{0,18})/",
    "py_number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
    "py_boolean": '"True" | "False"',
    "py_null": '"None"',
    "py_array": f'"[" (py_any ({COMMA} py_any)*)? "]"',
    "py_object": f'"{{" (py_member ({COMMA} py_member)*)? "}}"',
    "py_member": "py_string /: ?/ py_any",
    "py_any": "py_string | py_number | py_boolean | py_null | py_array | py_object",
}
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
BOUNDS = {"integer": NUMBERS, "number": NUMBERS, "string": ("minLength", "maxLength", "pattern", "format")}
"""Keywords of scalars that are enforced as in JSON: such numbers and texts are written there as in Python."""
LOOKS = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
"""What a pattern may have that the library does not: look-around and back-references. It is not enforced then."""
MAX_ITEMS = 1024
"""Above it the number of items of a list is not enforced."""
NEEDED = {"py_array": ("py_any",), "py_object": ("py_member",), "py_member": ("py_string", "py_any")}
NEEDED["py_any"] = ("py_string", "py_number", "py_boolean", "py_null", "py_array", "py_object")

Schema = Mapping[str, Any]


class PythonRules:
    """Collects rules; `text` is all of them."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._references: dict[tuple[int, str], str] = {}
        self._roots: list[Schema] = []

    @property
    def text(self) -> str:
        return "".join([rule(name, expression) for name, expression in self._rules.items()])

    def arguments(self, name: str, schema: Schema) -> None:
        """The rule `name` for the keywords of a call, in the schema's order."""
        self._roots.append(schema)
        members = schema.get("properties")
        if not isinstance(members, Mapping) or not (members or schema.get("additionalProperties") is False):
            self._rules[name] = f"(py_keyword ({COMMA} py_keyword)*)?"
            self._rules["py_keyword"] = f"/[a-zA-Z_][a-zA-Z0-9_]*/ {literal('=')} {self._known('py_any')}"
            return
        self._members(name, {key: literal(f"{key}=") for key in members if KEYWORD.fullmatch(key)}, schema)

    def _members(self, name: str, heads: Mapping[str, str], schema: Schema) -> None:
        """The rule `name` for members of an object, each written as its head, a right side, and a value."""
        wanted = schema.get("required")
        required = set(wanted) if isinstance(wanted, list) else set()
        keys = list(heads)
        values = [
            f"{heads[key]} {self._value(schema['properties'][key], f'{name}_v{i}')}" for i, key in enumerate(keys)
        ]
        # From behind: what may follow once a member came, and while none did.
        following, first = '""', '""'
        for i in reversed(range(len(keys))):
            optional = keys[i] not in required
            after, begin = f"{name}_m{i}", f"{name}_f{i}"
            self._rules[after] = f"{COMMA} {values[i]} {following}" + (f" | {following}" if optional else "")
            self._rules[begin] = f"{values[i]} {following}" + (f" | {first}" if optional else "")
            following, first = after, begin
        self._rules[name] = first

    def _value(self, schema: Any, name: str) -> str:
        """The right side of a rule for a value; `name` begins the names of rules that it needs."""
        if not isinstance(schema, Mapping):
            return self._known("py_any")
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._either([literal(text) for value in values for text in _spellings(value)])
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self._either([self._value(one, f"{name}_{i}") for i, one in enumerate(schema[key])])
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return self._either([self._typed(kind, schema, f"{name}_{i}") for i, kind in enumerate(kinds)])
        return self._typed(kinds, schema, name)

    def _typed(self, kind: object, schema: Schema, name: str) -> str:
        bounds = {key: schema[key] for key in BOUNDS.get(str(kind), ()) if key in schema}
        if LOOKS.search(str(bounds.get("pattern", ""))):
            del bounds["pattern"]
        if bounds:
            self._rules[name] = json_expression({"type": kind, **bounds}, lenient=True)
            return name
        if kind == "array" and not schema.keys().isdisjoint(("items", "minItems", "maxItems")):
            item = self._value(schema.get("items"), f"{name}_i")
            self._rules[name] = _list_of(item, _count(schema, "minItems") or 0, _count(schema, "maxItems"))
            return name
        members = schema.get("properties")
        if kind == "object" and isinstance(members, Mapping) and members:
            quoted = {key: self._either(list(map(literal, _spellings(key)))) for key in members}
            self._members(f"{name}_o", {key: f"{spellings} /: ?/" for key, spellings in quoted.items()}, schema)
            self._rules[name] = f'"{{" {name}_o "}}"'
            return name
        known = f"py_{kind}"
        return self._known(known if known in LEXEMES else "py_any")

    def _reference(self, reference: object) -> str:
        root = self._roots[-1]
        key = (len(self._roots), str(reference))
        if key not in self._references:
            try:
                schema = target_of(reference, root)
            except LookupError:
                return self._known("py_any")
            name = self._references[key] = f"ref_{len(self._references)}"
            self._rules[name] = self._value(schema, f"{name}_v")
        return self._references[key]

    def _known(self, name: str) -> str:
        if name not in self._rules:
            self._rules[name] = LEXEMES[name]
            for needed in NEEDED.get(name, ()):
                self._known(needed)
        return name

    @staticmethod
    def _either(expressions: Sequence[str]) -> str:
        return f"({' | '.join(dict.fromkeys(expressions))})"


def python_text(value: Any) -> str:
    """A value of JSON as Python writes it, with strings in double quotes."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(python_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join([f"{python_text(key)}: {python_text(inner)}" for key, inner in value.items()]) + "}"
    return repr(value)


def _count(schema: Schema, key: str) -> int | None:
    """A number of items that can be enforced; None without one."""
    number = schema.get(key)
    fits = isinstance(number, int | float) and number == int(number) and 0 <= number <= MAX_ITEMS
    return int(number) if fits and number is not None else None


def _list_of(item: str, least: int, most: int | None) -> str:
    """The right side of a rule for a list of at least and at most so many items."""
    if most is not None and most < max(1, least):
        return '"[" "]"'
    more = f"({COMMA} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
    return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'


def _spellings(value: Any) -> list[str]:
    text = python_text(value)
    if isinstance(value, str) and "'" not in value and "\\" not in text:
        return [text, f"'{value}'"]
    return [text]
