"""The keywords of JSON Schema by what they hold, and by the draft that knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
