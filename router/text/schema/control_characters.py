r"""Control characters that a schema requires and that JSON strings can only write as `\u00XX`.

llguidance writes them only if that escape is enabled, and otherwise drops them from constants. With the escape enabled,
a model may escape any character of a member's name. An object with both listed and other members could then contain a
listed member twice. Therefore only schemas that require the escape enable it, after a rewrite without such objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from router.text.schema.canonical_form import Document
from router.text.schema.keywords import Schema, Unenforceable, children, mapping, names
from router.text.schema.patterns import CONTROLS, demands_controls, none_of, without_quotes_for_controls

IN_LISTS = ("allOf", "anyOf", "prefixItems")


def has_controls(document: Document) -> bool:
    """Whether a constant or pattern of the schema contains such a character."""
    return any(map(_has_controls, _schemas(document)))


def without_open_objects(document: Document) -> Document:
    """Rewrite objects with `properties` and `additionalProperties`.

    A pattern of all other names replaces `additionalProperties`. Raises Unenforceable for objects that already have
    patterns.
    """
    definitions = {name: _closed(child, f"#/$defs/{name}") for name, child in document.definitions.items()}
    return Document(_closed(document.root, "#"), definitions, document.pointers)


def with_exact_sets(document: Document) -> Document:
    """Rewrite patterns so that llguidance converts them to JSON strings exactly (`without_quotes_for_controls`)."""
    definitions = {name: _with_exact_sets(child) for name, child in document.definitions.items()}
    return Document(_with_exact_sets(document.root), definitions, document.pointers)


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
    """Yield all strings within values. Member names are excluded: llguidance escapes them itself."""
    left = [*values]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += value
        elif isinstance(value, Mapping):
            left += value.values()


def _closed(schema: Schema, pointer: str) -> Schema:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties") and isinstance(value, Mapping):
            found[key] = {name: _closed(child, f"{pointer}/{key}") for name, child in value.items()}
        elif isinstance(value, list) and key in IN_LISTS:
            found[key] = [_closed(child, f"{pointer}/{key}") for child in value]
        else:
            found[key] = _closed(value, f"{pointer}/{key}") if key in ("items", "additionalProperties") else value
    others = found.get("additionalProperties", True)
    named = mapping(found, "properties")
    known = {**named, **{name: others for name in names(schema) if name not in named}}
    patterns = mapping(found, "patternProperties")
    if others is False or not (known or patterns):
        return found
    if patterns:
        raise Unenforceable(pointer, "members without a pattern cannot be enforced together with `\\u00XX` in strings")
    try:
        pattern = none_of(known)
    except ValueError as error:
        raise Unenforceable(pointer, str(error)) from error
    return {**found, "properties": known, "patternProperties": {pattern: others}, "additionalProperties": False}
