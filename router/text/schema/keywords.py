"""Keywords of JSON Schema by what they contain and by draft, and the values that a schema lists or rejects."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from router.text.schema.formats import PATTERNS

Schema = Any
"""An object, true or false; a client may send anything else in its place."""
CLOSED: Final = "x-closed"
"""Marks an object that gets no members but those that it names, although its schema would allow them."""
EXTRA: Final = "x-extra"
"""Schemas that answers match as well although the draft ignores them, as `const` in draft 4. Proofs ignore them."""
TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
"""Types that exclude each other; every integer is a number."""
MAPS: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLES: Final = (
    "not", "if", "then", "else", "additionalProperties", "propertyNames", "items", "additionalItems", "contains",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
PLAIN: Final = (
    "type", "enum", "const", "required", "dependentRequired", "minProperties", "maxProperties", "minItems", "maxItems",
    "uniqueItems", "minContains", "maxContains", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", *PATTERNS)
)
"""Those that are enforced, by llguidance or as patterns. JSON Schema makes annotations of all others."""
DRAFTS: Final = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
SINCE: Final = {
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7, "dependentRequired": 2019,
    "dependentSchemas": 2019, "minContains": 2019, "maxContains": 2019, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019, "prefixItems": 2020,
}  # fmt: skip
"""The first draft that knows a keyword, where that is not the fourth."""


MAX_PLACE_CHARS = 200
"""Of the pointer to a part of a schema in an error."""
MAX_LISTED = 100
"""Values of one schema with which a value is compared."""
BOUNDS: Final = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


class Unenforceable(ValueError):
    """A schema asks for what cannot be enforced exactly. The message begins with the place in the schema."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place[:MAX_PLACE_CHARS]}: {why}")
        self.why = why


def draft_of(document: Mapping[str, Any]) -> int:
    """The draft of a document: the newest where it names none that is known."""
    name = document.get("$schema")
    return DRAFTS.get(name.rstrip("#"), 2020) if isinstance(name, str) else 2020


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Every schema directly inside a schema, and its pointer from there."""
    for key, value in schema.items():
        if key in (*MAPS, "dependencies") and isinstance(value, Mapping):
            yield from ((f"/{key}/{escaped(name)}", child) for name, child in value.items())
        elif key in (*LISTS, "items") and isinstance(value, list):
            yield from ((f"/{key}/{i}", child) for i, child in enumerate(value))
        elif key in SINGLES:
            yield f"/{key}", value


def escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


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
