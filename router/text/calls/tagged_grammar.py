"""Grammar rules for arguments between tags, from the schema of a function.

Members are in the schema's order. For strings, enumerations, lengths, patterns and formats with a pattern are enforced.
All other values are JSON or Python literals, for which all keywords are enforced that the library supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.text.answer_grammar import document_expression, literal, rule
from router.text.calls.form import BREAK, Spell
from router.text.calls.python_grammar import PythonRules
from router.text.calls.tagged_scanner import ArgumentTags
from router.text.calls.tagged_value import spellings
from router.text.schema import (
    ANY,
    TYPES,
    Case,
    ObjectShape,
    Schemas,
    Shapes,
    Unenforceable,
    UnlistedMembers,
    names_lexeme,
    searched,
)

UNKNOWN_KEY = r'/[^<>"\n]{1,256}/'
"""Names of arguments that the schema does not name."""
SCALARS = frozenset(("string", "boolean", "null"))
"""Types whose values are plain text or one of a few words."""
MOST_ENFORCED_CHARS = 4096
"""Above it the length of a text is not enforced."""


class TaggedRules:
    """Collects rules; `text` is all of them. Tags that are special tokens are `marks`, which `spell` names."""

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
        opened = [self._spelled(tags.open), key, self._spelled(tags.key_end)]
        opened += [BREAK, self._spelled(tags.value)] if tags.value else [self._line]
        self._rules[name] = self._value(name, schemas)
        return " ".join(filter(None, (*opened, name, BREAK)))

    def _value(self, name: str, schemas: Schemas) -> str:
        """The right side of a rule for a value and the tag that closes it; `name` begins names of rules it needs."""
        cases = self._shapes.cases(*schemas)
        if any(case.is_any for case in cases):
            return self._closed_text("any_text", "")
        others = [case for case in cases if case.values is None]
        listed = [text for case in cases for value in case.values or () for text in self._spellings(value)]
        found = [self._closed_literal(text) for text in [*listed, *self._words(others)]]
        structured = [case for case in others if not case.types <= SCALARS]
        for i, case in enumerate(case for case in others if "string" in case.types):
            found.append(self._text(f"{name}_t{i}", case, is_alone=not structured))
        if structured:
            schema = self._shapes.narrowed(structured, frozenset(TYPES) - SCALARS)
            self._rules[f"{name}_json"] = document_expression(self._shapes.document_of(schema), lenient=True)
            found.append(f"{name}_json {self._close}")
            if self._tags.python:
                found.append(f"({self._python.of_cases(structured, without=SCALARS)}) {self._close}")
        if not found:
            raise Unenforceable("#", "a value of this schema cannot be written between tags")
        return " | ".join(dict.fromkeys(found))

    def _words(self, cases: Sequence[Case]) -> list[str]:
        types = frozenset[str]().union(*(case.types for case in cases))
        words = [*([True, False] if "boolean" in types else []), *([None] if "null" in types else [])]
        return [text for word in words for text in self._spellings(word)]

    def _spellings(self, value: Any) -> list[str]:
        """Return the texts of an enumerated value, without those that contain the closing tag."""
        texts = spellings(value, python=self._tags.python)
        return [text for text in texts if not (isinstance(value, str) and self._tags.close in text)]

    def _text(self, name: str, case: Case, *, is_alone: bool) -> str:
        """Return the right side of a rule for a string and its closing tag.

        Unless it `is_alone`, the value may also be of another type that begins with the same characters. The library's
        lexer then reads up to the closing tag, so the string and the tag must be one unconstrained lexeme.
        """
        least, most = int(case.most("minLength") or 0), case.least("maxLength")
        wanted = []
        if not is_alone:
            least = 0
        else:
            wanted = [lexeme for each in case.keywords("pattern") if (lexeme := searched(each["pattern"]))]
        if least or (most is not None and most <= MOST_ENFORCED_CHARS):
            least = min(least, MOST_ENFORCED_CHARS)
            wanted.append(f"/[\\s\\S]{{{least},{'' if most is None or most > MOST_ENFORCED_CHARS else int(most)}}}/")
        return self._closed_text(name if wanted else "any_text", " & ".join(wanted))

    def _closed_literal(self, text: str) -> str:
        """Return an enumerated text and its closing tag, as one lexeme if the tag is text, like `_closed_text`."""
        if self._is_special(self._tags.close):
            return f"{literal(text)} {self._close}"
        return literal(f"{text}{self._line and chr(10)}{self._tags.close}")

    def _closed_text(self, name: str, wanted: str) -> str:
        """Return a text that matches the lexemes `wanted`, and its closing tag. `name` is the name of the rule.

        The text must not contain the tag, because the scanner would end it there.
        """
        if self._is_special(self._tags.close):
            self._rules[name.upper()] = wanted or f"/{ANY}/"
            return " ".join(filter(None, (name.upper(), self._line, self._spelled(self._tags.close))))
        close = literal(f"{chr(10) if self._line else ''}{self._tags.close}")
        other = f"~(/{ANY}/ {literal(self._tags.close)} /{ANY}/)"
        if not wanted and not self._line:  # a lazy lexeme, which ends at the first tag
            self._rules[f"{name}[lazy]"] = f"/{ANY}/ {close}"
        else:
            self._rules[f"{name}[lazy]"] = f"({' & '.join(filter(None, (wanted, other)))}) {close}"
        return name

    @property
    def _close(self) -> str:
        return " ".join(filter(None, (self._line, self._spelled(self._tags.close))))

    def _is_special(self, mark: str) -> bool:
        return mark in self._marks and self._spell(mark).startswith("<[")

    def _spelled(self, tag: str) -> str:
        return self._spell(tag) if self._is_special(tag) else literal(tag)
