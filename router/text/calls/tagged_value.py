"""Arguments that a model writes as plain text between tags: what is JSON in them, by the schema of the function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.text.calls.python_grammar import python_text
from router.text.calls.python_literal import NotLiteralError, read_value
from router.text.schema import Schemas, Shapes

TEXT_ONLY = frozenset({"string"})
AS_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What models write that have read more Python than JSON."""
SPELLINGS = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}


@dataclass(frozen=True, slots=True)
class ValueReader:
    """Reads the texts of one argument. Its value must match all schemas of one of the `alternatives`."""

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
        return any(self.shapes.accepts(value, *schemas) for schemas in self.alternatives)


def reader_of(shapes: Shapes, name: str) -> ValueReader | None:
    """Return the reader of an argument, or None if the schema does not constrain its value."""
    alternatives = shapes.members(name)
    cases = [case for schemas in alternatives for case in shapes.cases(*schemas)]
    if not cases or any(case.is_any for case in cases):
        return None
    return ValueReader(shapes, alternatives, frozenset[str]().union(*(case.types for case in cases)))


def as_json(text: str, reader: ValueReader | None, *, python: bool = False) -> str:
    """Convert a model's text for a value to JSON. It is a string if the schema accepts no other type.

    With `python`, lists and dictionaries may be in Python's syntax.
    """
    if reader is not None and reader.is_text:
        return written(text)
    try:
        value = _read(text, python)
        made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        made.encode()  # half of a surrogate pair can be written in JSON, and not be sent
    except (ValueError, RecursionError, NotLiteralError):
        return written(text)
    if isinstance(value, str) or (reader is not None and reader.may_be_text and not reader.accepts(value)):
        return written(text)
    return made


def spellings(value: Any, *, python: bool = False) -> list[str]:
    """Return the spellings of a JSON value: strings unchanged, `None` and others for null."""
    if isinstance(value, str):
        return [value]
    if value is None or isinstance(value, bool):
        return list(SPELLINGS[value])
    texts = [json.dumps(value, ensure_ascii=False)]
    return [*texts, python_text(value)] if python else texts


def as_text(value: Any, *, python: bool = False) -> str:
    """Return the last spelling in Python's notation, the first otherwise."""
    return spellings(value, python=python)[-1 if python else 0]


def written(text: str) -> str:
    """A string of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _read(text: str, python: bool) -> Any:
    try:
        return json.loads(AS_PYTHON.get(text.strip(), text), parse_constant=_no_number)
    except ValueError:
        if not python or text.lstrip()[:1] not in ("[", "{"):
            raise
        return read_value(text)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
