"""Values that a schema lists: equality as JSON Schema has it, and which values a schema surely rejects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.text.schema.keywords import TYPES, Schema

MAX_LISTED = 100
"""Values of one schema with which a value is compared."""
BOUNDS: Final = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def key_of(value: Any) -> str:
    """Equal for values that JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list) else value


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def listed(schema: Schema) -> list[Any] | None:
    """The values that `enum` and `const` of one schema allow, or None for schemas without."""
    if not isinstance(schema, Mapping):
        return None
    values: list[Any] | None = None
    if isinstance(enum := schema.get("enum"), list):
        values = enum
    if "const" in schema:
        const = schema["const"]
        values = [const] if values is None or key_of(const) in map(key_of, values) else []
    return values


def number(schema: Mapping[str, Any], key: str) -> float | None:
    """A bound of a schema; None without one, or for one that is no number."""
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def names(schema: Mapping[str, Any], key: str = "required") -> list[str]:
    value = schema.get(key)
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def sequence(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else ()


def types_of(schema: Schema) -> frozenset[str]:
    """The types that a schema's own `type` and listed values allow; `number` where it allows integers."""
    if not isinstance(schema, Mapping):
        return frozenset(TYPES) if schema is not False else frozenset()
    named = schema.get("type")
    several = [named] if isinstance(named, str) else named if isinstance(named, list) else TYPES
    known = frozenset("number" if name == "integer" else name for name in several if isinstance(name, str))
    values = listed(schema)
    return known if values is None else known & frozenset(map(type_of, values))


def rejects(schema: Schema, value: Any) -> bool:
    """Whether a schema surely rejects a value. Patterns, references, alternatives and long lists are not looked at."""
    if not isinstance(schema, Mapping):
        return schema is False
    kind, values = type_of(value), listed(schema)
    if kind not in types_of({"type": schema["type"]} if "type" in schema else True):
        return True
    if kind == "number" and not _takes_fractions(schema) and not float(value).is_integer():
        return True
    if values is not None and len(values) <= MAX_LISTED and key_of(value) not in map(key_of, values):
        return True
    return _outside_bounds(schema, kind, value) or _wrong_parts(schema, kind, value)


def _takes_fractions(schema: Mapping[str, Any]) -> bool:
    named = schema.get("type", "number")
    return named == "number" or (isinstance(named, list) and "number" in named)


def _outside_bounds(schema: Mapping[str, Any], kind: str, value: Any) -> bool:
    if kind == "number":
        above = number(schema, "exclusiveMinimum"), number(schema, "exclusiveMaximum")
        if (above[0] is not None and value <= above[0]) or (above[1] is not None and value >= above[1]):
            return True
    least, most = BOUNDS.get(kind, ("", ""))
    low, high = number(schema, least), number(schema, most)
    size = value if kind == "number" else len(value) if kind in BOUNDS else 0
    return (low is not None and size < low) or (high is not None and size > high)


def _wrong_parts(schema: Mapping[str, Any], kind: str, value: Any) -> bool:
    if kind == "object":
        known = mapping(schema, "properties")
        if any(name not in value for name in names(schema)):
            return True
        if any(name in value and rejects(child, value[name]) for name, child in known.items()):
            return True
        is_shut = schema.get("additionalProperties") is False and not mapping(schema, "patternProperties")
        return is_shut and any(name not in known for name in value)
    if kind == "array":
        first = sequence(schema, "prefixItems")
        if any(rejects(child, item) for child, item in zip(first, value, strict=False)):
            return True
        return any(rejects(schema.get("items", True), item) for item in value[len(first) :])
    return False
