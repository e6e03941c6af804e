"""Reasoning about schemas: proofs that several schemas have no common value, and negation of a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from router.text.schema.canonical_form import Document
from router.text.schema.keywords import (
    CLOSED,
    EXTRA,
    TYPES,
    Schema,
    Unenforceable,
    key_of,
    listed,
    mapping,
    names,
    number,
    rejects,
    sequence,
    type_of,
    types_of,
)
from router.text.schema.patterns import beginning_of, none_begins, none_of, texts_of

MAX_PROOF_STEPS = 100_000
"""Maximum number of steps for all proofs about one document."""
MAX_VALUES = 2_000
"""Maximum number of listed values that are checked one by one."""
MAX_PROOF_DEPTH = 12
"""Maximum nesting depth that a proof examines."""
MAX_REFERENCES = 8
"""Maximum number of chained references to follow. A recursive schema would never end."""
MAX_NEGATION_STEPS = 20_000
"""Maximum number of steps for all negations in one document."""
MAX_ITEMS = 64
"""Maximum length of a tuple that can be negated: one alternative is written per item."""
IGNORED: Final = ("format", "minContains", "maxContains", "then", "else", CLOSED, EXTRA)
"""Keywords that reject nothing: formats are annotations, and the others only modify another keyword."""
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


@dataclass(slots=True)
class FlatSchema:
    """A schema with its `allOf` and references resolved: its parts, and alternatives of which one must match."""

    parts: list[Mapping[str, Any]] = field(default_factory=list)
    options: list[Sequence[Schema]] = field(default_factory=list)
    is_false: bool = False

    def types(self) -> frozenset[str]:
        return frozenset(TYPES).intersection(*map(types_of, self.parts))

    def within(self) -> frozenset[str]:
        """Return the types, plus `integer` if all numbers must be integers."""
        found = self.types()
        return found | {"integer"} if any(part.get("type") == "integer" for part in self.parts) else found

    def members(self, name: str) -> list[Schema]:
        """Return the schemas of the member `name`."""
        return [known[name] for part in self.parts if name in (known := mapping(part, "properties"))]

    def all_members(self) -> list[str] | None:
        """Return the names of all members that an object may have, or None if it may have unnamed members."""
        for part in self.parts:
            is_closed = CLOSED in part or part.get("additionalProperties") is False
            if is_closed and not mapping(part, "patternProperties"):
                return list(mapping(part, "properties"))
        return None

    def items(self) -> list[Schema]:
        """Return the schemas that every item must match."""
        return [part["items"] for part in self.parts if "items" in part and not part.get("prefixItems")]

    def values(self) -> list[Any] | None:
        found = [values for part in self.parts if (values := listed(part)) is not None]
        return min(found, key=len) if found else None


class Proofs:
    """Proofs about the schemas of one document. Limited to `MAX_PROOF_STEPS`; after that nothing is proved."""

    def __init__(self, document: Document) -> None:
        self._document, self._left = document, MAX_PROOF_STEPS
        self._keys: dict[int, tuple[Any, frozenset[str]]] = {}

    def flat(self, *schemas: Schema) -> FlatSchema:
        """Combine schemas that apply to the same value. Incomplete once the steps are used up."""
        found, left, seen = FlatSchema(), list(schemas), set()
        while left and self._left > 0:
            schema = left.pop()
            self._left -= 1
            if not isinstance(schema, Mapping):
                found.is_false |= schema is False
                continue
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            found.parts.append(schema)
            left.extend(sequence(schema, "allOf"))
            if "$ref" in schema:
                left.append(self._document.target(schema["$ref"]))
            found.options += [options for key in ("anyOf", "oneOf") if (options := sequence(schema, key))]
        return found

    def is_impossible(self, *schemas: Schema) -> bool:
        """Whether no value matches all schemas. False if that cannot be proved within the limits."""
        return self._impossible(self.flat(*schemas), 0)

    def _impossible(self, all_of: FlatSchema, depth: int) -> bool:
        self._left -= 1 + len(all_of.parts)
        if self._left < 0 or depth > MAX_PROOF_DEPTH:
            return False
        if all_of.is_false or self._contradict(all_of.parts) or self._has_no_value(all_of):
            return True
        if all(self._none_of(kind, all_of.parts, depth) for kind in all_of.types()):
            return True
        return any(self._has_no_option(all_of, i, depth) for i in range(len(all_of.options)))

    def _has_no_value(self, all_of: FlatSchema) -> bool:
        """Whether the parts list values, but reject all of them."""
        if (values := all_of.values()) is None or len(values) > MAX_VALUES:
            return False
        lists = [self._keys_of(listed(part) or [], part) for part in all_of.parts if listed(part) is not None]
        common = frozenset.intersection(*lists)
        self._left -= len(common) * len(all_of.parts)
        left = (value for value in values if key_of(value) in common)
        return all(any(rejects(part, value) for part in all_of.parts) for value in left)

    def _contradict(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        """Whether one part is the `not` of another."""
        nots = [part["not"] for part in parts if isinstance(part.get("not"), Mapping)]
        denied = frozenset[str]().union(*(self._keys_of([schema], schema) for schema in nots))
        return bool(denied) and any(key_of(part) in denied for part in parts)

    def _keys_of(self, values: Sequence[Any], owner: Any) -> frozenset[str]:
        """Return the keys of `values`, cached by the identity of `owner`, which the cache keeps alive."""
        known = self._keys.get(id(owner))
        if known is None:
            known = self._keys[id(owner)] = owner, frozenset(map(key_of, values))
        return known[1]

    def _has_no_option(self, all_of: FlatSchema, index: int, depth: int) -> bool:
        """Whether every option of the alternative `index` is impossible in combination with the rest."""
        others = [*all_of.options[:index], *all_of.options[index + 1 :]]
        for option in all_of.options[index]:
            found = self.flat(option)
            found.parts += all_of.parts
            found.options += others
            if not self._impossible(found, depth + 1):
                return False
        return True

    def _none_of(self, kind: str, parts: Sequence[Mapping[str, Any]], depth: int) -> bool:
        """Whether no value of a type matches all parts."""
        match kind:
            case "number":
                return _is_empty_range(parts)
            case "string":
                return _exceeds(parts, "minLength", "maxLength") or _has_conflicting_prefixes(parts)
            case "array":
                return _exceeds(parts, "minItems", "maxItems") or self._no_array(parts, depth)
            case "object":
                return self._no_object(parts, depth)
            case _:
                return False

    def _no_array(self, parts: Sequence[Mapping[str, Any]], depth: int) -> bool:
        needed = max((number(part, "minItems") or 0 for part in parts), default=0)
        longest = max((len(sequence(part, "prefixItems")) for part in parts), default=0)
        for i in range(min(int(needed), longest + 1)):
            items = [first[i] if i < len(first := sequence(p, "prefixItems")) else p.get("items", True) for p in parts]
            if self._impossible(self.flat(*items), depth + 1):
                return True
        return False

    def _no_object(self, parts: Sequence[Mapping[str, Any]], depth: int) -> bool:
        required = dict.fromkeys(name for part in parts for name in names(part))
        most = min((bound for part in parts if (bound := number(part, "maxProperties")) is not None), default=None)
        if most is not None and (len(required) > most or _exceeds(parts, "minProperties", "maxProperties")):
            return True
        for name in required:
            if any(_forbids(part, name) for part in parts):
                return True
            members = FlatSchema([*parts]).members(name)
            if members and self._impossible(self.flat(*members), depth + 1):
                return True
        return False


def _forbids(part: Mapping[str, Any], name: str) -> bool:
    is_shut = part.get("additionalProperties") is False and not mapping(part, "patternProperties")
    return is_shut and name not in mapping(part, "properties")


def _has_conflicting_prefixes(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether patterns require different beginnings."""
    beginnings = [beginning_of(part["pattern"]) for part in parts if "pattern" in part]
    longest = max(beginnings, key=len, default="")
    return not all(longest.startswith(each) for each in beginnings)


def _exceeds(parts: Sequence[Mapping[str, Any]], least: str, most: str) -> bool:
    low = [bound for part in parts if (bound := number(part, least)) is not None]
    high = [bound for part in parts if (bound := number(part, most)) is not None]
    return bool(low) and bool(high) and max(low) > min(high)


def _is_empty_range(parts: Sequence[Mapping[str, Any]]) -> bool:
    low = [(bound, 1) for p in parts if (bound := number(p, "exclusiveMinimum")) is not None]
    low += [(bound, 0) for p in parts if (bound := number(p, "minimum")) is not None]
    high = [(bound, -1) for p in parts if (bound := number(p, "exclusiveMaximum")) is not None]
    high += [(bound, 0) for p in parts if (bound := number(p, "maximum")) is not None]
    return bool(low) and bool(high) and max(low) > min(high)


class Negation:
    """Negation of the schemas of one document."""

    def __init__(self, document: Document, proofs: Proofs) -> None:
        self._document, self._proofs, self._left = document, proofs, MAX_NEGATION_STEPS

    def negated(self, schema: Schema, context: FlatSchema, pointer: str, depth: int = 0) -> Schema:
        """Return a schema of the values that match `context` but not `schema`. Raises Unenforceable."""
        if not isinstance(schema, Mapping):
            return schema is False
        self._left -= 1
        if self._left < 0:
            raise Unenforceable(pointer, f"its opposite has more than {MAX_NEGATION_STEPS:,} parts")
        found: list[Schema] = []
        for key, value in schema.items():
            if key not in IGNORED:
                found += self._failing(key, value, schema, context, pointer, depth)
        return any_of(found)

    def _failing(
        self, key: str, value: Any, schema: Mapping[str, Any], context: FlatSchema, pointer: str, depth: int
    ) -> Iterable[Schema]:
        """Return schemas of the values that one keyword rejects."""

        def negated(child: Schema) -> Schema:
            return self.negated(child, context, f"{pointer}/{key}", depth)

        within = context.within()

        if key in _BOUNDS and number(schema, key) is not None:
            failing = _BOUNDS[key](value)
            return [failing] if failing is not False and failing["type"] in within else []
        match key:
            case "$ref":
                if depth >= MAX_REFERENCES:
                    raise Unenforceable(pointer, "a schema that refers to itself cannot be negated")
                return [self.negated(self._document.target(value), context, f"{pointer}/$ref", depth + 1)]
            case "type":
                return _other_types(value, within, pointer)
            case "enum" | "const":
                return _other_values(listed({key: value}) or [], within, pointer)
            case "not":
                return [value]
            case "allOf":
                return map(negated, sequence(schema, key))
            case "anyOf":
                return [all_of(map(negated, sequence(schema, key)))]
            case "oneOf":
                self._require_exclusive(sequence(schema, key), pointer)
                return [all_of(map(negated, sequence(schema, key)))]
            case "if":
                then, otherwise = schema.get("then", True), schema.get("else", True)
                return [all_of([value, negated(then)]), all_of([negated(value), negated(otherwise)])]
        if (
            "object" in within
            and (found := self._failing_member(key, value, schema, context, pointer, depth)) is not None
        ):
            return found
        if "array" in within and (found := self._failing_item(key, value, schema, context, pointer, depth)) is not None:
            return found
        if key == "pattern":
            return _other_texts(value, pointer) if "string" in within else []
        if _kind(key) in within:
            raise Unenforceable(pointer, f"the opposite of `{key}` cannot be enforced")
        return []

    def _failing_member(
        self, key: str, value: Any, schema: Mapping[str, Any], context: FlatSchema, pointer: str, depth: int
    ) -> Iterable[Schema] | None:
        def negated(child: Schema, name: str) -> Schema:
            member = self._proofs.flat(*context.members(name))
            return self.negated(child, member, f"{pointer}/{key}/{name}", depth)

        match key:
            case "required":
                return [without(name) for name in names(schema)]
            case "properties":
                known = mapping(schema, key).items()
                return [has(name, failing) for name, child in known if (failing := negated(child, name)) is not False]
            case "patternProperties" | "additionalProperties" if value is True or value == {}:
                return []
            case "additionalProperties" if (every := context.all_members()) is not None:
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
                opposites = ((name, self.negated(child, context, f"{pointer}/{key}", depth)) for name, child in needed)
                return [all_of([has(name), opposite]) for name, opposite in opposites]
        return None

    def _failing_item(
        self, key: str, value: Any, schema: Mapping[str, Any], context: FlatSchema, pointer: str, depth: int
    ) -> Iterable[Schema] | None:
        first = sequence(schema, "prefixItems")
        match key:
            case "prefixItems" if len(first) <= MAX_ITEMS:
                failing = [
                    self.negated(child, FlatSchema(), f"{pointer}/{key}/{i}", depth) for i, child in enumerate(first)
                ]
                return [at(i, child) for i, child in enumerate(failing) if child is not False]
            case "items" if value is False:
                return [{"type": "array", "minItems": len(first) + 1}]
            case "items" if value is True or value == {}:
                return []
            case "items" if not first and (items := context.items()) and self._proofs.is_impossible(value, *items):
                return [{"type": "array", "minItems": 1}]
            case "contains" if "minContains" not in schema and "maxContains" not in schema:
                return [{"type": "array", "items": self.negated(value, FlatSchema(), f"{pointer}/{key}", depth)}]
            case "uniqueItems" if value is False:
                return []
        return None

    def _require_exclusive(self, cases: Iterable[Schema], pointer: str) -> None:
        cases = list(cases)
        if len(cases) > MAX_ITEMS or not all(
            self._proofs.is_impossible(a, b) for i, a in enumerate(cases) for b in cases[:i]
        ):
            raise Unenforceable(pointer, "the opposite of a `oneOf` whose cases may overlap cannot be enforced")


def without(name: str) -> dict[str, Schema]:
    """Return a schema of objects without the member `name`."""
    return {"type": "object", "properties": {name: False}}


def has(name: str, child: Schema = True) -> dict[str, Schema]:
    """Return a schema of objects with the member `name`, which matches `child`."""
    return {"type": "object", "properties": {name: child}, "required": [name]}


def at(index: int, child: Schema) -> dict[str, Schema]:
    """Return a schema of arrays whose item `index` matches `child`."""
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


def _other_types(value: Any, within: frozenset[str], pointer: str) -> list[Schema]:
    """Return a schema of all other types. The negation of `integer` excludes all numbers: fractions are unsupported."""
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise Unenforceable(pointer, "type must be a string or a list of strings")
    if "integer" in named and "number" not in named and within == {"number"}:
        raise Unenforceable(pointer, "a number that is not an integer cannot be enforced")
    others = [
        name for name in TYPES if name in within and name not in named and (name != "number" or "integer" not in named)
    ]
    return [{"type": others}] if others else []


def _other_values(values: list[Any], within: frozenset[str], pointer: str) -> list[Schema]:
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
                found.append(_text(none_of, by_type[kind], pointer))
            case "object" if by_type[kind] == [{}]:
                found.append({"type": "object", "minProperties": 1})
            case "array" if by_type[kind] == [[]]:
                found.append({"type": "array", "minItems": 1})
            case _:
                raise Unenforceable(pointer, f"the opposite of a listed {kind} cannot be enforced")
    return found


def _other_numbers(values: list[float]) -> list[Schema]:
    ordered = sorted({key_of(value): value for value in values}.values())
    between = [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in zip(ordered, ordered[1:], strict=False)
    ]
    first, last = ordered[0], ordered[-1]
    return [{"type": "number", "exclusiveMaximum": first}, *between, {"type": "number", "exclusiveMinimum": last}]


def _other_texts(pattern: object, pointer: str) -> list[Schema]:
    if (found := texts_of(pattern)) is None:
        raise Unenforceable(pointer, "the opposite of this `pattern` cannot be enforced")
    texts, is_whole = found
    if not is_whole:
        return [_text(none_begins, texts, pointer)]
    lines = [text + "\n" for text in texts]  # some validators let `$` match before a final newline
    return [_text(none_of, [*texts, *lines], pointer)]


def _text(pattern_of: Callable[[Iterable[str]], str], texts: list[str], pointer: str) -> Schema:
    try:
        return {"type": "string", "pattern": pattern_of(texts)}
    except ValueError as error:
        raise Unenforceable(pointer, str(error)) from error


def _kind(key: str) -> str:
    """Return the type of value that a keyword constrains."""
    if key in ("prefixItems", "items", "contains", "uniqueItems", "unevaluatedItems"):
        return "array"
    return "number" if key == "multipleOf" else "object"
