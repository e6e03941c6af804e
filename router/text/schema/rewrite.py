"""Rewrites the keywords that llguidance does not know in those that it knows, so that exactly the same values match.

    canonical document ──> not, oneOf, if, dependent*, contains, ... become anyOf and allOf of plain schemas

Where that is impossible, or would take too much, `Unenforceable` says which part of the schema is the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.text.schema import arrays, objects
from router.text.schema.canonical_form import MAX_SCHEMAS, Document
from router.text.schema.disjoint import Proofs
from router.text.schema.finite import mapping, names, sequence
from router.text.schema.formats import pattern_of
from router.text.schema.keywords import CLOSED, EXTRA, LISTS, SINGLES, Schema, Unenforceable, escaped
from router.text.schema.negation import Negation, all_of, any_of
from router.text.schema.one_of import alone, exclusive
from router.text.schema.regexes import has_looks

MAX_REWRITTEN_DEPTH = 120
"""Of schemas within schemas, those that rewriting adds included."""
MAPS = ("properties", "patternProperties")
REWRITTEN = (
    "not", "oneOf", "if", "then", "else", "dependentRequired", "dependentSchemas", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "minContains", "maxContains",
    "uniqueItems", CLOSED, EXTRA,
)  # fmt: skip


def rewritten(document: Document, *, lenient: bool = False) -> Document:
    """A document that the same values match, in keywords that llguidance knows. Raises Unenforceable.

    `lenient` leaves out what cannot be enforced.
    """
    rewriting = _Rewriting(document, lenient)
    definitions = {
        name: rewriting.schema(child, document.places.get(name, "#"), 0) for name, child in document.definitions.items()
    }
    return Document(rewriting.schema(document.root, "#", 0), definitions)


class _Rewriting:
    def __init__(self, document: Document, lenient: bool) -> None:
        self._document, self._lenient = document, lenient
        self._proofs = Proofs(document)
        self._negation = Negation(document, self._proofs)
        self._left = MAX_SCHEMAS

    def schema(self, schema: Schema, place: str, depth: int) -> Schema:
        if not isinstance(schema, Mapping):
            return schema
        self._left -= 1
        if self._left < 0 or depth > MAX_REWRITTEN_DEPTH:
            raise Unenforceable(
                place, "the schema is too large, or too deep, after `oneOf`, `not` and the like are resolved"
            )
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in REWRITTEN:
                continue
            if key in MAPS and isinstance(value, Mapping):
                step = f"{place}/{key}"
                found[key] = {n: self.schema(child, f"{step}/{escaped(n)}", depth + 1) for n, child in value.items()}
            elif key in LISTS and isinstance(value, list):
                written = [self.schema(child, f"{place}/{key}/{i}", depth + 1) for i, child in enumerate(value)]
                found[key] = [*found.get(key, ()), *written]
            elif key in SINGLES:
                found[key] = self.schema(value, f"{place}/{key}", depth + 1)
            elif key == "pattern" and self._lenient and isinstance(value, str) and has_looks(value):
                continue
            elif key == "format" and (pattern := pattern_of(value)):
                found["allOf"] = [*found.get("allOf", ()), {"pattern": pattern}]
            else:
                found[key] = value
        if CLOSED in schema:
            found["additionalProperties"] = False
        more = [each for each in self._more(schema, place, depth + 1) if each is not True]
        if more:
            found["allOf"] = [*found.get("allOf", ()), *more]
        return found

    def _more(self, schema: Mapping[str, Any], place: str, depth: int) -> list[Schema]:
        """Schemas that say what the schema's keywords say that llguidance does not know."""
        found = [self.schema(each, place, depth) for each in sequence(schema, EXTRA)]
        for key in (key for key in schema if key in REWRITTEN):
            try:
                if key in ("minProperties", "maxProperties"):
                    found += objects.counted(schema, key, f"{place}/{key}")
                else:
                    found += [self.schema(each, place, depth) for each in self._meant(key, schema, f"{place}/{key}")]
            except Unenforceable:
                if not self._lenient:
                    raise
                if key == "oneOf":
                    found.append(self.schema({"anyOf": schema["oneOf"]}, place, depth))
        return found

    def _meant(self, key: str, schema: Mapping[str, Any], place: str) -> list[Schema]:
        match key:
            case "not":
                beside = self._proofs.flat({k: v for k, v in schema.items() if k != "not"})
                return [self._negation.negated(schema["not"], beside, place)]
            case "oneOf":
                cases = sequence(schema, key)
                return [any_of(exclusive(cases, alone(schema), self._proofs, self._negation, place))]
            case "if":
                return self._conditions(schema, place)
            case "dependentRequired":
                return list(_dependent_names(schema))
            case "dependentSchemas":
                needed = [(name, child) for name, child in mapping(schema, key).items() if child is not True]
                return [any_of([_lacks(name), all_of([{"required": [name]}, child])]) for name, child in needed]
            case "propertyNames":
                return [objects.named(self._document, schema, place)]
            case "unevaluatedProperties":
                return [objects.evaluated(schema, place)]
            case "unevaluatedItems":
                raise Unenforceable(place, "`unevaluatedItems` cannot be enforced")
            case "contains":
                return arrays.containing(schema, place)
            case "uniqueItems" if schema[key] is True:
                return [arrays.unique(schema, self._proofs, place)]
        return []

    def _conditions(self, schema: Mapping[str, Any], place: str) -> list[Schema]:
        """`if`, `then` and `else`: the condition fails or the first holds, and the condition or the second holds."""
        condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
        found: list[Schema] = []
        beside = self._proofs.flat({k: v for k, v in schema.items() if k not in ("if", "then", "else")})
        if then is not True:
            fails = self._negation.negated(condition, beside, place)
            return [any_of([all_of([condition, then]), all_of([fails, otherwise])])]
        if otherwise is not True:
            found.append(any_of([condition, otherwise]))
        return found


def _dependent_names(schema: Mapping[str, Any]) -> list[Schema]:
    required = names(schema)
    found: list[Schema] = []
    for name, needed in mapping(schema, "dependentRequired").items():
        missing = [other for other in names({"required": needed}) if other not in required and other != name]
        if missing and name in required:
            found.append({"required": missing})
        elif missing:
            found.append({"anyOf": [_lacks(name), {"required": [name, *missing]}]})
    return found


def _lacks(name: str) -> Schema:
    """Any value that is no object with this member."""
    return {"properties": {name: False}}
