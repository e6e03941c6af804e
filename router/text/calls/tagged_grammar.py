"""Grammar rules for arguments between tags, from their JSON schema.

Members in the schema's order, types, listed values, references, alternatives and lengths of texts are enforced; of what
is JSON all that the library enforces. Patterns and formats of texts are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.answer.closed_schema import target_of
from router.text.answer.grammar import json_expression, literal, rule
from router.text.calls.form import Spell
from router.text.calls.tagged_scanner import ArgumentTags
from router.text.calls.tagged_value import MOST_REFERENCES, as_text

KEY = re.compile(r'[^<>"\n]{1,256}')
ANY_KEY = "/[a-zA-Z_][a-zA-Z0-9_]*/"
DEFINITIONS = ("$defs", "definitions")
MOST_ENFORCED_CHARS = 4096
"""Above it the length of a text is not enforced."""

Schema = Mapping[str, Any]


class TaggedRules:
    """Collects rules; `text` is all of them. Tags that are special tokens are `marks`, which `spell` names."""

    def __init__(self, tags: ArgumentTags, spell: Spell, marks: Sequence[str]) -> None:
        self._tags, self._spell, self._marks = tags, spell, marks
        self._rules: dict[str, str] = {}
        line = "\n" if tags.lined else ""
        self._close = self._spelled(tags.close, before=line, after="\n")
        self._key_end = self._spelled(tags.key_end, after=line if not tags.value else "")
        self._opened = self._spelled(tags.value, before="\n") if tags.value else ""

    @property
    def text(self) -> str:
        return "".join([rule(name, expression) for name, expression in self._rules.items()])

    def arguments(self, name: str, schema: Schema) -> None:
        """The rule `name` for the arguments of a call."""
        members = schema.get("properties")
        members = members if isinstance(members, Mapping) else {}
        if not members and schema.get("additionalProperties") is not False:
            self._rules[name] = f"({self._argument(ANY_KEY, self._any_text())})*"
            return
        wanted = schema.get("required")
        required = set(wanted) if isinstance(wanted, list) else set()
        parts = []
        for i, (key, member) in enumerate(members.items()):
            if not KEY.fullmatch(key):
                continue
            value = f"{name}_v{i}"
            self._rules[value] = self._valued(member, schema, value)
            part = self._argument(literal(key), value)
            parts.append(part if key in required else f"({part})?")
        self._rules[name] = " ".join(parts) or '""'

    def _argument(self, key: str, value: str) -> str:
        return " ".join(filter(None, (self._spelled(self._tags.open), key, self._key_end, self._opened, value)))

    def _valued(self, schema: Any, root: Schema, name: str, depth: int = 0) -> str:
        """The right side of a rule for a value and the tag that closes it; `name` begins names of rules it needs."""
        if not isinstance(schema, Mapping) or depth > MOST_REFERENCES:
            return self._any_text()
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            texts = " | ".join(dict.fromkeys(literal(as_text(value)) for value in values))
            return f"({texts or literal('')}) {self._close}"
        if "$ref" in schema:
            try:
                return self._valued(target_of(schema["$ref"], root), root, name, depth + 1)
            except LookupError:
                return self._any_text()
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                either = enumerate(schema[key])
                return self._either([self._valued(one, root, f"{name}_{i}", depth + 1) for i, one in either])
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return self._either([self._typed(kind, schema, root, f"{name}_{i}") for i, kind in enumerate(kinds)])
        return self._typed(kinds, schema, root, name)

    def _typed(self, kind: object, schema: Schema, root: Schema, name: str) -> str:
        if kind == "string":
            return self._text(name, schema)
        if not isinstance(kind, str):
            return self._any_text()
        known = {key: root[key] for key in DEFINITIONS if key in root}
        self._rules[f"{name}_json"] = json_expression({**known, **schema, "type": kind}, lenient=True)
        return f"{name}_json {self._close}"

    def _text(self, name: str, schema: Schema) -> str:
        least, most = _count(schema, "minLength") or 0, _count(schema, "maxLength")
        if not least and most is None:
            return self._any_text()
        self._add_text(f"{name}_text", f"/(.|\\n){{{least},{'' if most is None else most}}}/")
        return f"{name}_text{self._after_text}"

    def _any_text(self) -> str:
        self._add_text("any_text", "/(.|\\n)*/")
        return f"any_text{self._after_text}"

    def _add_text(self, name: str, characters: str) -> None:
        """The rule `name`: a lexeme that ends with the closing tag, or before it where that is a token of its own."""
        if self._after_text:
            self._rules[name] = characters
        else:
            self._rules[f"{name}[lazy]"] = f"{characters} {self._close}"

    @property
    def _after_text(self) -> str:
        return f" {self._close}" if self._is_special(self._tags.close) else ""

    def _is_special(self, mark: str) -> bool:
        return mark in self._marks and self._spell(mark).startswith("<[")

    def _spelled(self, tag: str, *, before: str = "", after: str = "") -> str:
        """A tag with what stands around it."""
        if self._is_special(tag):
            around = (literal(before) if before else "", self._spell(tag), literal(after) if after else "")
            return " ".join(filter(None, around))
        return literal(f"{before}{tag}{after}")

    @staticmethod
    def _either(expressions: Sequence[str]) -> str:
        return f"({' | '.join(dict.fromkeys(expressions))})"


def _count(schema: Schema, key: str) -> int | None:
    """A number of characters that can be enforced; None without one."""
    number = schema.get(key)
    fits = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MOST_ENFORCED_CHARS
    return number if fits else None
