"""JSON Schema keywords, grouped by content and draft, and helpers that read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from router.text.schema.formats import PATTERNS

Schema = Any
"""A mapping or a bool. Client input may contain any other JSON value instead."""
CLOSED: Final = "x-closed"
"""Marks an object that is restricted to its named members, although its schema allows others."""
EXTRA: Final = "x-extra"
"""Schemas that generated values also match although the draft ignores them, like `const` in draft 4. Not used in
proofs."""
TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
"""Mutually exclusive types. Every integer is a number."""
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
"""Formats that are enforced, by llguidance or as patterns. All others are annotations."""
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
"""First draft that defines a keyword; keywords that are not listed are in draft 4."""


MAX_POINTER_CHARS = 200
"""Maximum length of the JSON pointer in an error."""
MAX_LISTED = 100
"""Maximum number of listed values with which a value is compared."""
BOUNDS: Final = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


class Unenforceable(ValueError):
    """A schema that cannot be enforced exactly. The message starts with a JSON pointer to the cause."""

    def __init__(self, pointer: str, why: str) -> None:
        super().__init__(f"{pointer[:MAX_POINTER_CHARS]}: {why}")
        self.why = why


def draft_of(document: Mapping[str, Any]) -> int:
    """Return the draft of a document, or the newest if `$schema` is missing or unknown."""
    name = document.get("$schema")
    return DRAFTS.get(name.rstrip("#"), 2020) if isinstance(name, str) else 2020


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield every direct subschema with its relative JSON pointer."""
    for key, value in schema.items():
        if key in (*MAPS, "dependencies") and isinstance(value, Mapping):
            yield from ((f"/{key}/{escaped(name)}", child) for name, child in value.items())
        elif key in (*LISTS, "items") and isinstance(value, list):
            yield from ((f"/{key}/{i}", child) for i, child in enumerate(value))
        elif key in SINGLES:
            yield f"/{key}", value


def escaped(name: str) -> str:
    """Escape a name as a JSON pointer step (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def key_of(value: Any) -> str:
    """Key for comparing values as JSON Schema does: 1 equals 1.0, 1 does not equal true."""
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
    """Return the values that `enum` and `const` allow together, or None without either keyword."""
    if not isinstance(schema, Mapping):
        return None
    values: list[Any] | None = None
    if isinstance(enum := schema.get("enum"), list):
        values = enum
    if "const" in schema:
        const = schema["const"]
        values = [const] if values is None or key_of(const) in map(key_of, values) else []
    return values


def is_finite(value: float) -> bool:
    """Whether a number is finite. Integers may be too large for a float."""
    return isinstance(value, int) or math.isfinite(value)


def is_whole(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


def is_count(value: Any) -> bool:
    return is_number(value) and is_whole(value) and value >= 0


def is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


VALUES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "type": (lambda value: isinstance(value, str) or is_names(value), "a string or an array of strings"),
    "enum": (lambda value: isinstance(value, list), "an array"),
    "required": (is_names, "an array of strings"),
    "dependentRequired": (
        lambda value: isinstance(value, Mapping) and all(map(is_names, value.values())),
        "an object of arrays of strings",
    ),
    **{key: (lambda value: isinstance(value, str), "a string") for key in ("pattern", "format")},
    **{key: (is_count, "a non-negative integer") for kind in ("string", "array", "object") for key in BOUNDS[kind]},
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (is_number, "a number")
    ),
}
"""The test of a keyword's value, and what the value must be. Of other keywords, invalid values are ignored."""


def check(key: str, value: Any, pointer: str) -> None:
    """Raise Unenforceable if the value of a keyword, which is at `pointer`, is invalid."""
    is_valid, kind = VALUES.get(key, (None, ""))
    if is_valid is not None and not is_valid(value):
        raise Unenforceable(pointer, f"must be {kind}")


def number(schema: Mapping[str, Any], key: str) -> float | None:
    """Return a numeric keyword, or None if it is missing or not a finite number."""
    value = schema.get(key)
    return value if is_number(value) else None


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
    """Return the types that `type`, `enum` and `const` allow. `integer` is reported as `number`."""
    if not isinstance(schema, Mapping):
        return frozenset(TYPES) if schema is not False else frozenset()
    named = schema.get("type")
    several = [named] if isinstance(named, str) else named if isinstance(named, list) else TYPES
    known = frozenset("number" if name == "integer" else name for name in several if isinstance(name, str))
    values = listed(schema)
    return known if values is None else known & frozenset(map(type_of, values))


def rejects(schema: Schema, value: Any) -> bool:
    """Whether a schema certainly rejects a value. Ignores patterns, references, alternatives and long lists."""
    if not isinstance(schema, Mapping):
        return schema is False
    kind, values = type_of(value), listed(schema)
    if kind not in types_of({"type": schema["type"]} if "type" in schema else True):
        return True
    if kind == "number" and not _takes_fractions(schema) and not is_whole(value):
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
