"""Closing of objects: objects that name members get no other members, unless the schema mentions others.

JSON Schema allows every member that it does not forbid, and weak models invent members. The strict mode of xgrammar,
the default in vLLM and SGLang, also closes objects, and OpenAI requires closed objects for `strict: true`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from router.text.schema.keywords import CLOSED, EXTRA

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalItems", "contains", "additionalProperties", "then", "else")
ALTERNATIVES = ("anyOf", "oneOf", "$ref", "then", "else", "dependentSchemas")
"""Keywords whose schemas describe the same value as the schema that contains them."""
OF_OTHERS = ("additionalProperties", "minProperties", "propertyNames")
"""Keywords that constrain unnamed members."""

Schema = Mapping[str, Any]


def closed(schema: Schema) -> Schema:
    """Mark objects with `CLOSED` if they name members and do not mention others.

    An object that several schemas describe (an `allOf` of two, a `$ref` next to `properties`) stays open. Otherwise
    each schema would forbid the members that the others name.
    """
    try:
        shared = _shared(schema)
    except LookupError:
        return schema
    return {**_closed(schema, shared)}


def _closed(schema: Any, shared: set[int]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            copy[key] = {name: _closed(child, shared) for name, child in value.items()}
        elif key in LISTED and isinstance(value, list):
            copy[key] = [_closed(child, shared) for child in value]
        elif key in SINGLE:
            copy[key] = _closed(value, shared)
    if id(schema) not in shared and _names_all(schema):
        copy[CLOSED] = True
    return copy


def _names_all(schema: Schema) -> bool:
    """Whether the object names all the members that it can have."""
    named, patterns, required = (schema.get(key) for key in ("properties", "patternProperties", "required"))
    if not isinstance(named, Mapping) and not isinstance(patterns, Mapping):
        return False
    if any(key in schema for key in OF_OTHERS) or schema.get("unevaluatedProperties", False) is not False:
        return False
    known = named if isinstance(named, Mapping) else {}
    wanted = [required, *_needed(schema), *(names for extra in _list(schema, EXTRA) for names in _needed(extra))]
    return all(name in known for names in wanted if isinstance(names, list) for name in names)


def _needed(schema: Schema) -> list[Any]:
    """Return the lists of member names in `dependentRequired`."""
    return list(_dict(schema, "dependentRequired").values())


def _shared(document: Schema) -> set[int]:
    """Return the ids of schemas that describe a value together with other schemas.

    Raises LookupError for a `$ref` that `target_of` cannot resolve.
    """
    found: set[int] = set()
    left: list[Any] = [document]
    while left:
        schema = left.pop()
        if isinstance(schema, Mapping):
            left.extend(_children(schema))
            if _num_descriptions(schema) > 1:
                _share(schema, document, found)
    return found


def _num_descriptions(schema: Schema) -> int:
    """Count the schemas that describe a value of this schema, including itself."""
    itself = any(key in schema for key in ("properties", "patternProperties", "required"))
    return itself + len(_list(schema, "allOf")) + sum(key in schema for key in ALTERNATIVES)


def _share(schema: Schema, document: Schema, found: set[int]) -> None:
    """Add a schema, and all others that describe the same value, to `found`."""
    left: list[Any] = [schema]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping) or id(schema) in found:
            continue
        found.add(id(schema))
        for key in ("allOf", "anyOf", "oneOf"):
            left.extend(_list(schema, key))
        left.extend(_dict(schema, "dependentSchemas").values())
        left.extend(schema[key] for key in ("then", "else") if key in schema)
        if "$ref" in schema:
            left.append(target_of(schema["$ref"], document))


def _children(schema: Schema) -> Iterable[Any]:
    for key in NAMED:
        yield from _dict(schema, key).values()
    for key in LISTED:
        yield from _list(schema, key)
    yield from (schema[key] for key in SINGLE if key in schema)


def target_of(reference: object, document: Schema) -> Any:
    """Resolve a reference of the form `#/$defs/name`. Raises LookupError for other forms and missing targets."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise LookupError(reference)
    target: Any = document
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = dict(enumerate(target))[int(key) if key.isdecimal() else -1]
        elif isinstance(target, Mapping):
            target = target[key]
        else:
            raise LookupError(reference)
    return target


def _dict(schema: Schema, key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
