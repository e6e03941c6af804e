"""The schema of all values that another schema rejects, where JSON Schema without `not` can say it exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from router.text.schema.canonical_form import Document
from router.text.schema.disjoint import Flat, Proofs
from router.text.schema.finite import key_of, listed, mapping, names, number, sequence, type_of
from router.text.schema.keywords import CLOSED, EXTRA, TYPES, Schema, Unenforceable
from router.text.schema.texts import none_begins, none_of, texts_of

MAX_REFERENCES = 8
"""References within references that are followed. A schema that refers to itself has no end."""
MAX_NEGATION_STEPS = 20_000
"""Of all negations for one document."""
MAX_ITEMS = 64
"""Of a tuple, each of which may be the one that fails."""
IGNORED: Final = ("format", "minContains", "maxContains", "then", "else", CLOSED, EXTRA)
"""Nothing fails by these alone: formats are annotations, and the others belong to further keywords."""
_Bound = Callable[[float], Schema]
_BOUNDS: Final[dict[str, _Bound]] = {
    "minimum": lambda bound: {"type": "number", "exclusiveMaximum": bound},
    "maximum": lambda bound: {"type": "number", "exclusiveMinimum": bound},
    "exclusiveMinimum": lambda bound: {"type": "number", "maximum": bound},
    "exclusiveMaximum": lambda bound: {"type": "number", "minimum": bound},
    "minLength": lambda bound: {"type": "string", "maxLength": bound - 1} if bound > 0 else False,
    "maxLength": lambda bound: {"type": "string", "minLength": bound + 1},
    "minItems": lambda bound: {"type": "array", "maxItems": bound - 1} if bound > 0 else False,
    "maxItems": lambda bound: {"type": "array", "minItems": bound + 1},
    "minProperties": lambda bound: {"type": "object", "maxProperties": bound - 1} if bound > 0 else False,
    "maxProperties": lambda bound: {"type": "object", "minProperties": bound + 1},
}


class Negation:
    """Negates schemas of one document."""

    def __init__(self, document: Document, proofs: Proofs) -> None:
        self._document, self._proofs, self._left = document, proofs, MAX_NEGATION_STEPS

    def negated(self, schema: Schema, beside: Flat, place: str, depth: int = 0) -> Schema:
        """A schema of the values that `schema` rejects among those that match all that is `beside` it.

        Raises Unenforceable.
        """
        if not isinstance(schema, Mapping):
            return schema is False
        self._left -= 1
        if self._left < 0:
            raise Unenforceable(place, f"the opposite of it has more than {MAX_NEGATION_STEPS:,} parts")
        found: list[Schema] = []
        for key, value in schema.items():
            if key not in IGNORED:
                found += self._failing(key, value, schema, beside, place, depth)
        return any_of(found)

    def _failing(
        self, key: str, value: Any, schema: Mapping[str, Any], beside: Flat, place: str, depth: int
    ) -> Iterable[Schema]:
        """Schemas of the values that fail by one keyword."""

        def negated(child: Schema) -> Schema:
            return self.negated(child, beside, f"{place}/{key}", depth)

        within = beside.within()

        if key in _BOUNDS and number(schema, key) is not None:
            failing = _BOUNDS[key](value)
            return [failing] if failing is not False and failing["type"] in within else []
        match key:
            case "$ref":
                if depth >= MAX_REFERENCES:
                    raise Unenforceable(place, "a schema that refers to itself cannot be negated")
                return [self.negated(self._document.target(value), beside, f"{place}/$ref", depth + 1)]
            case "type":
                return _other_types(value, within, place)
            case "enum" | "const":
                return _other_values(listed({key: value}) or [], within, place)
            case "not":
                return [value]
            case "allOf":
                return map(negated, sequence(schema, key))
            case "anyOf":
                return [all_of(map(negated, sequence(schema, key)))]
            case "oneOf":
                self._require_exclusive(sequence(schema, key), place)
                return [all_of(map(negated, sequence(schema, key)))]
            case "if":
                then, otherwise = schema.get("then", True), schema.get("else", True)
                return [all_of([value, negated(then)]), all_of([negated(value), negated(otherwise)])]
        if "object" in within and (found := self._failing_member(key, value, schema, beside, place, depth)) is not None:
            return found
        if "array" in within and (found := self._failing_item(key, value, schema, beside, place, depth)) is not None:
            return found
        if key == "pattern":
            return _other_texts(value, place) if "string" in within else []
        if _kind(key) in within:
            raise Unenforceable(place, f"the opposite of `{key}` cannot be enforced")
        return []

    def _failing_member(
        self, key: str, value: Any, schema: Mapping[str, Any], beside: Flat, place: str, depth: int
    ) -> Iterable[Schema] | None:
        def negated(child: Schema, name: str) -> Schema:
            member = self._proofs.flat(*beside.members(name))
            return self.negated(child, member, f"{place}/{key}/{name}", depth)

        match key:
            case "required":
                return [without(name) for name in names(schema)]
            case "properties":
                known = mapping(schema, key).items()
                return [has(name, failing) for name, child in known if (failing := negated(child, name)) is not False]
            case "patternProperties" | "additionalProperties" if value is True or value == {}:
                return []
            case "additionalProperties" if (every := beside.all_members()) is not None:
                if not mapping(schema, "patternProperties"):
                    others = [name for name in every if name not in mapping(schema, "properties")]
                    return [has(name, failing) for name in others if (failing := negated(value, name)) is not False]
            case "dependentRequired":
                return [
                    {**without(other), "required": [name]}
                    for name, needed in mapping(schema, key).items()
                    for other in names({"required": needed})
                ]
            case "dependentSchemas":
                needed = mapping(schema, key).items()
                opposites = ((name, self.negated(child, beside, f"{place}/{key}", depth)) for name, child in needed)
                return [all_of([has(name), opposite]) for name, opposite in opposites]
        return None

    def _failing_item(
        self, key: str, value: Any, schema: Mapping[str, Any], beside: Flat, place: str, depth: int
    ) -> Iterable[Schema] | None:
        first = sequence(schema, "prefixItems")
        match key:
            case "prefixItems" if len(first) <= MAX_ITEMS:
                failing = [self.negated(child, Flat(), f"{place}/{key}/{i}", depth) for i, child in enumerate(first)]
                return [at(i, child) for i, child in enumerate(failing) if child is not False]
            case "items" if value is False:
                return [{"type": "array", "minItems": len(first) + 1}]
            case "items" if value is True or value == {}:
                return []
            case "items" if not first and (items := beside.items()) and self._proofs.is_impossible(value, *items):
                return [{"type": "array", "minItems": 1}]
            case "contains" if "minContains" not in schema and "maxContains" not in schema:
                return [{"type": "array", "items": self.negated(value, Flat(), f"{place}/{key}", depth)}]
            case "uniqueItems" if value is False:
                return []
        return None

    def _require_exclusive(self, cases: Iterable[Schema], place: str) -> None:
        cases = list(cases)
        if len(cases) > MAX_ITEMS or not all(
            self._proofs.are_disjoint(a, b) for i, a in enumerate(cases) for b in cases[:i]
        ):
            raise Unenforceable(place, "the opposite of a `oneOf` whose cases may overlap cannot be enforced")


def without(name: str) -> dict[str, Schema]:
    """An object without a member."""
    return {"type": "object", "properties": {name: False}}


def has(name: str, child: Schema = True) -> dict[str, Schema]:
    """An object with a member of a schema."""
    return {"type": "object", "properties": {name: child}, "required": [name]}


def at(index: int, child: Schema) -> dict[str, Schema]:
    """An array with an item of a schema at a place."""
    return {"type": "array", "prefixItems": [*[True] * index, child], "minItems": index + 1}


def any_of(schemas: Iterable[Schema]) -> Schema:
    found = [schema for schema in schemas if schema is not False]
    if any(schema is True for schema in found):
        return True
    return {"anyOf": found} if len(found) > 1 else found[0] if found else False


def all_of(schemas: Iterable[Schema]) -> Schema:
    found = [schema for schema in schemas if schema is not True]
    if any(schema is False for schema in found):
        return False
    return {"allOf": found} if len(found) > 1 else found[0] if found else True


def _other_types(value: Any, within: frozenset[str], place: str) -> list[Schema]:
    """All types but some. The opposite of integers is without numbers: fractions alone cannot be enforced."""
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise Unenforceable(place, "type must be a text, or texts")
    if "integer" in named and "number" not in named and within == {"number"}:
        raise Unenforceable(place, "a number that is no integer cannot be enforced")
    others = [
        name for name in TYPES if name in within and name not in named and (name != "number" or "integer" not in named)
    ]
    return [{"type": others}] if others else []


def _other_values(values: list[Any], within: frozenset[str], place: str) -> list[Schema]:
    by_type = {kind: [value for value in values if type_of(value) == kind] for kind in TYPES}
    found: list[Schema] = []
    untouched = [kind for kind in TYPES if kind in within and not by_type[kind]]
    if untouched:
        found.append({"type": untouched})
    for kind in (kind for kind in TYPES if kind in within and by_type[kind]):
        match kind:
            case "null":
                pass
            case "boolean":
                found += [{"const": value} for value in (False, True) if value not in by_type[kind]]
            case "number":
                found += _other_numbers(by_type[kind])
            case "string":
                found.append(_text(none_of, by_type[kind], place))
            case "object" if by_type[kind] == [{}]:
                found.append({"type": "object", "minProperties": 1})
            case "array" if by_type[kind] == [[]]:
                found.append({"type": "array", "minItems": 1})
            case _:
                raise Unenforceable(place, f"the opposite of one {kind} cannot be enforced")
    return found


def _other_numbers(values: list[float]) -> list[Schema]:
    ordered = sorted({key_of(value): value for value in values}.values())
    between = [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in zip(ordered, ordered[1:], strict=False)
    ]
    first, last = ordered[0], ordered[-1]
    return [{"type": "number", "exclusiveMaximum": first}, *between, {"type": "number", "exclusiveMinimum": last}]


def _other_texts(pattern: object, place: str) -> list[Schema]:
    if (found := texts_of(pattern)) is None:
        raise Unenforceable(place, "the opposite of this `pattern` cannot be enforced")
    texts, is_whole = found
    if not is_whole:
        return [_text(none_begins, texts, place)]
    lines = [text + "\n" for text in texts]  # some validators take `$` for the end of a last line
    return [_text(none_of, [*texts, *lines], place)]


def _text(pattern_of: Callable[[Iterable[str]], str], texts: list[str], place: str) -> Schema:
    try:
        return {"type": "string", "pattern": pattern_of(texts)}
    except ValueError as error:
        raise Unenforceable(place, str(error)) from error


def _kind(key: str) -> str:
    """The type that a keyword speaks of."""
    if key in ("prefixItems", "items", "contains", "uniqueItems", "unevaluatedItems"):
        return "array"
    return "number" if key == "multipleOf" else "object"
