"""Arguments that a model writes as plain text between tags: what is JSON in them, by the schema of the function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.text.answer.closed_schema import target_of

TEXT_ONLY = frozenset({"string"})
MOST_REFERENCES = 8
"""Behind each other; with more a schema says nothing of its type."""
AS_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What models write that have read more Python than JSON."""

Schema = Mapping[str, Any]


def kinds_of(schema: Any, root: Schema, depth: int = 0) -> frozenset[str] | None:
    """The types of values that a schema takes; None where it does not say. `root` has what it refers to."""
    if not isinstance(schema, Mapping) or depth > MOST_REFERENCES:
        return None
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(kind_of, values))
    if "$ref" in schema:
        try:
            return kinds_of(target_of(schema["$ref"], root), root, depth + 1)
        except LookupError:
            return None
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            found = [kinds_of(one, root, depth + 1) for one in schema[key]]
            return None if None in found else frozenset[str]().union(*(kinds for kinds in found if kinds is not None))
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    return frozenset(kinds) if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds) else None


def kind_of(value: Any) -> str:
    """The type of a value of JSON. A whole number is an integer, in whatever form it is written."""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case None:
            return "null"
    return "object"


def as_json(text: str, kinds: frozenset[str] | None) -> str:
    """What a model wrote for a value of these types, as JSON: a string where it can be nothing else."""
    if kinds == TEXT_ONLY:
        return written(text)
    try:
        value = json.loads(AS_PYTHON.get(text.strip(), text), parse_constant=_no_number)
        made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        made.encode()  # half of a surrogate pair can be written in JSON, and not be sent
    except (ValueError, RecursionError):
        return written(text)
    if isinstance(value, str) or (kinds is not None and "string" in kinds and not _is_of(kind_of(value), kinds)):
        return written(text)
    return made


def as_text(value: Any) -> str:
    """A value of JSON as these models write it: strings as they are."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(text: str) -> str:
    """A string of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _is_of(kind: str, kinds: frozenset[str]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
