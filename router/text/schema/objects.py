"""Rewrites what a schema says about an object's members in ways that llguidance does not know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from router.text.schema.canonical_form import Document
from router.text.schema.finite import listed, mapping, names, number, rejects
from router.text.schema.formats import pattern_of
from router.text.schema.keywords import CLOSED, Schema, Unenforceable
from router.text.schema.negation import MAX_REFERENCES, all_of, any_of

MAX_CHOICES = 64
"""Ways to choose members, each of which becomes an object of its own."""


def counted(schema: Mapping[str, Any], key: str, place: str) -> list[Schema]:
    """Schemas that together say what `minProperties` or `maxProperties`, the `key`, does. Raises Unenforceable.

    They are of a form that llguidance enforces: members are required, forbidden, or all counted members are unnamed.
    """
    bound = number(schema, key)
    if bound is None:
        return [{key: schema[key]}]  # for llguidance to complain
    required = dict.fromkeys(names(schema))
    optional = [n for n, child in mapping(schema, "properties").items() if child is not False and n not in required]
    is_closed = CLOSED in schema or schema.get("additionalProperties") is False
    is_closed = is_closed and not mapping(schema, "patternProperties")
    more = int(bound) - len(required)
    if key == "minProperties":
        return [_at_least(int(bound), more, optional, is_closed, place)] if more > 0 else []
    return [_at_most(int(bound), more, optional, is_closed, place)]


def _at_least(least: int, more: int, optional: list[str], is_closed: bool, place: str) -> Schema:
    """`least` members, `more` of which are not required ones."""
    if not is_closed and more > 1:
        why = f"minProperties {least} cannot be enforced for members without names: two may have the same one"
        raise Unenforceable(place, why)
    ways: list[Schema] = [{"required": list(chosen)} for chosen in _choices(optional, more, "minProperties", place)]
    if not is_closed:
        ways.append({**_none_of(optional), "minProperties": least})
    return any_of(ways)


def _at_most(most: int, more: int, optional: list[str], is_closed: bool, place: str) -> Schema:
    """`most` members, `more` of which are not required ones."""
    if more < 0:
        return {"maxProperties": most}  # which llguidance finds impossible
    if is_closed:
        if more >= len(optional):
            return True
        chosen = _choices(optional, more, "maxProperties", place)
        return any_of(_none_of([n for n in optional if n not in kept]) for kept in chosen)
    ways: list[Schema] = []
    for size in range(min(more, len(optional)) + 1):
        for kept in _choices(optional, size, "maxProperties", place):
            others = _none_of([n for n in optional if n not in kept])
            ways.append({**others, "required": list(kept), "maxProperties": most})
    return any_of(ways)


def _none_of(members: list[str]) -> dict[str, Schema]:
    return {"properties": dict.fromkeys(members, False)} if members else {}


def _choices(optional: list[str], size: int, key: str, place: str) -> list[tuple[str, ...]]:
    if math.comb(len(optional), size) > MAX_CHOICES:
        raise Unenforceable(place, f"{key} leaves more than {MAX_CHOICES} ways to choose among {len(optional)} members")
    return list(combinations(optional, size))


def named(document: Document, schema: Mapping[str, Any], place: str) -> Schema:
    """A schema that says of an object what its `propertyNames` does. Raises Unenforceable."""
    if mapping(schema, "patternProperties"):
        raise Unenforceable(place, "`propertyNames` beside `patternProperties` cannot be enforced")
    return _named(document, schema["propertyNames"], place)


def _named(document: Document, wanted: Schema, place: str) -> Schema:
    for _ in range(MAX_REFERENCES):
        if isinstance(wanted, Mapping) and "$ref" in wanted and set(wanted) <= {"$ref", "type"}:
            wanted = document.target(wanted["$ref"])
    if not isinstance(wanted, Mapping):
        return True if wanted is True else {"maxProperties": 0}
    if rejects({"type": wanted.get("type", "string")}, ""):
        return {"maxProperties": 0}
    if (values := listed(wanted)) is not None:
        rest = {key: value for key, value in wanted.items() if key not in ("enum", "const")}
        if set(rest) - {"type", "minLength", "maxLength"}:
            raise Unenforceable(place, "`propertyNames` of listed names and further keywords cannot be enforced")
        known = [value for value in values if isinstance(value, str) and not rejects(rest, value)]
        return {"properties": dict.fromkeys(known, True), "additionalProperties": False}
    said = [key for key in wanted if key != "type"]
    if not said:
        return True
    if said == ["not"]:
        return _not_named(wanted["not"], place)
    if said == ["allOf"]:
        return all_of(_named(document, each, place) for each in wanted["allOf"])
    if said == ["pattern"] and isinstance(wanted["pattern"], str):
        pattern = wanted["pattern"]
    elif said == ["format"] and (defined := pattern_of(wanted["format"])):
        pattern = defined
    elif not set(said) - {"minLength", "maxLength"}:
        least, most = int(number(wanted, "minLength") or 0), number(wanted, "maxLength")
        pattern = rf"^[\s\S]{{{least},{'' if most is None else int(most)}}}$"
    else:
        raise Unenforceable(place, f"`propertyNames` with {', '.join(f'`{key}`' for key in said)} cannot be enforced")
    return {"patternProperties": {pattern: True}, "additionalProperties": False}


def _not_named(denied: Schema, place: str) -> Schema:
    if (
        isinstance(denied, Mapping)
        and (values := listed(denied)) is not None
        and set(denied) <= {"enum", "const", "type"}
    ):
        return {
            "properties": {value: False for value in values if isinstance(value, str) and not rejects(denied, value)}
        }
    if isinstance(denied, Mapping) and set(denied) == {"pattern"}:
        return {"patternProperties": {denied["pattern"]: False}}
    raise Unenforceable(place, "`propertyNames` with this `not` cannot be enforced")


def evaluated(schema: Mapping[str, Any], place: str) -> Schema:
    """A schema for `unevaluatedProperties` where no other schema describes the object. Raises Unenforceable."""
    if schema["unevaluatedProperties"] in (True, {}):
        return True
    if any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")):
        raise Unenforceable(
            place, "`unevaluatedProperties` of an object that several schemas describe cannot be enforced"
        )
    if "additionalProperties" in schema:
        return True
    beside = {key: schema[key] for key in ("properties", "patternProperties") if key in schema}
    return {**_any(beside), "additionalProperties": schema["unevaluatedProperties"]}


def _any(beside: Mapping[str, Any]) -> dict[str, Any]:
    """The same names, each with any value."""
    return {key: dict.fromkeys(value, True) if isinstance(value, Mapping) else value for key, value in beside.items()}
