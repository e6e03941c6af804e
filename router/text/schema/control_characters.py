r"""Control characters that a schema requires and that JSON strings can only spell as `\u00XX`.

The grammar library writes them only if that escape is allowed, and otherwise drops them from constants. With the escape
allowed, a model may escape any character of a member's name, so in an object with listed and further members, a listed
member could occur twice. So only schemas that require the escape get it, in a form without such objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from router.text.schema.canonical_form import Document
from router.text.schema.keywords import Schema, Unenforceable, children, mapping, names
from router.text.schema.patterns import CONTROLS, demands_controls, none_of, without_quotes_for_controls

IN_LISTS = ("allOf", "anyOf", "prefixItems")


def has_controls(document: Document) -> bool:
    """Whether a constant or a pattern of the schema contains such a character."""
    return any(map(_has_controls, _schemas(document)))


def without_open_objects(document: Document) -> Document:
    """Rewrite objects with `properties` and `additionalProperties`.

    A pattern of all further names replaces the latter. Raises Unenforceable if that takes two patterns.
    """
    definitions = {name: _closed(child, f"#/$defs/{name}") for name, child in document.definitions.items()}
    return Document(_closed(document.root, "#"), definitions, document.places)


def with_exact_sets(document: Document) -> Document:
    """Rewrite patterns so that the library converts them to JSON strings exactly (`without_quotes_for_controls`)."""
    definitions = {name: _with_exact_sets(child) for name, child in document.definitions.items()}
    return Document(_with_exact_sets(document.root), definitions, document.places)


def _with_exact_sets(schema: Schema) -> Schema:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties" and isinstance(value, Mapping):
            found[key] = {name: _with_exact_sets(child) for name, child in value.items()}
        elif key == "patternProperties" and isinstance(value, Mapping):
            patterns: dict[str, Schema] = {}
            for name, child in value.items():
                exact, written = without_quotes_for_controls(name), _with_exact_sets(child)
                patterns[exact] = {"allOf": [patterns[exact], written]} if exact in patterns else written
            found[key] = patterns
        elif isinstance(value, list) and key in IN_LISTS:
            found[key] = [_with_exact_sets(child) for child in value]
        elif key == "pattern" and isinstance(value, str):
            found[key] = without_quotes_for_controls(value)
        else:
            found[key] = _with_exact_sets(value) if key in ("items", "additionalProperties") else value
    return found


def _schemas(document: Document) -> Iterator[Mapping[str, Any]]:
    left: list[Schema] = [document.root, *document.definitions.values()]
    while left:
        schema = left.pop()
        if isinstance(schema, Mapping):
            yield schema
            left += [child for _, child in children(schema)]


def _has_controls(schema: Mapping[str, Any]) -> bool:
    patterns = [schema["pattern"]] if "pattern" in schema else []
    constants = [schema[key] for key in ("const", "enum") if key in schema]
    found = any(
        isinstance(each, str) and demands_controls(each) for each in (*patterns, *mapping(schema, "patternProperties"))
    )
    return found or any(ord(character) in CONTROLS for text in _texts(constants) for character in text)


def _texts(values: list[Any]) -> Iterator[str]:
    """Yield all strings within values, without member names, which the library escapes itself."""
    left = [*values]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += value
        elif isinstance(value, Mapping):
            left += value.values()


def _closed(schema: Schema, place: str) -> Schema:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties") and isinstance(value, Mapping):
            found[key] = {name: _closed(child, f"{place}/{key}") for name, child in value.items()}
        elif isinstance(value, list) and key in IN_LISTS:
            found[key] = [_closed(child, f"{place}/{key}") for child in value]
        else:
            found[key] = _closed(value, f"{place}/{key}") if key in ("items", "additionalProperties") else value
    others = found.get("additionalProperties", True)
    named = mapping(found, "properties")
    known = {**named, **{name: others for name in names(schema) if name not in named}}
    patterns = mapping(found, "patternProperties")
    if others is False or not (known or patterns):
        return found
    if patterns:
        raise Unenforceable(place, "members without a pattern cannot be enforced next to `\\u00XX` in texts")
    try:
        pattern = none_of(known)
    except ValueError as error:
        raise Unenforceable(place, str(error)) from error
    return {**found, "properties": known, "patternProperties": {pattern: others}, "additionalProperties": False}
