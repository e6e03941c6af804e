"""Proves that no value matches both of two schemas. A proof that is not found says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.text.schema.canonical_form import Document
from router.text.schema.finite import key_of, listed, mapping, names, number, rejects, sequence, types_of
from router.text.schema.keywords import CLOSED, TYPES, Schema
from router.text.schema.texts import beginning_of

MAX_PROOF_STEPS = 100_000
"""Of all proofs for one document together."""
MAX_VALUES = 2_000
"""Listed values that are tried one by one."""
MAX_PROOF_DEPTH = 12
"""Of schemas within schemas that a proof looks at."""


@dataclass(slots=True)
class Flat:
    """A schema and all that it asks for on the same value: its parts, and lists of which one must match."""

    parts: list[Mapping[str, Any]] = field(default_factory=list)
    options: list[Sequence[Schema]] = field(default_factory=list)
    is_false: bool = False

    def types(self) -> frozenset[str]:
        return frozenset(TYPES).intersection(*map(types_of, self.parts))

    def within(self) -> frozenset[str]:
        """The types, and `integer` as well where all numbers are integers."""
        found = self.types()
        return found | {"integer"} if any(part.get("type") == "integer" for part in self.parts) else found

    def members(self, name: str) -> list[Schema]:
        """The schemas of a member."""
        return [known[name] for part in self.parts if name in (known := mapping(part, "properties"))]

    def all_members(self) -> list[str] | None:
        """The names of all members that an object may have; None where it may have others than those that are named."""
        for part in self.parts:
            is_closed = CLOSED in part or part.get("additionalProperties") is False
            if is_closed and not mapping(part, "patternProperties"):
                return list(mapping(part, "properties"))
        return None

    def items(self) -> list[Schema]:
        """Schemas that every item matches."""
        return [part["items"] for part in self.parts if "items" in part and not part.get("prefixItems")]

    def values(self) -> list[Any] | None:
        found = [values for part in self.parts if (values := listed(part)) is not None]
        return min(found, key=len) if found else None


class Proofs:
    """Proofs about schemas of one document."""

    def __init__(self, document: Document) -> None:
        self._document, self._left = document, MAX_PROOF_STEPS
        self._keys: dict[int, tuple[Any, frozenset[str]]] = {}

    def flat(self, *schemas: Schema) -> Flat:
        """All schemas together; only some of their parts when the steps are used up."""
        found, left, seen = Flat(), list(schemas), set()
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

    def are_disjoint(self, a: Schema, b: Schema) -> bool:
        return self.is_impossible(a, b)

    def is_impossible(self, *schemas: Schema) -> bool:
        """Whether no value matches all of these schemas."""
        return self._impossible(self.flat(*schemas), 0)

    def _impossible(self, all_of: Flat, depth: int) -> bool:
        self._left -= 1 + len(all_of.parts)
        if self._left < 0 or depth > MAX_PROOF_DEPTH:
            return False
        if all_of.is_false or self._contradict(all_of.parts) or self._has_no_value(all_of):
            return True
        if all(self._none_of(kind, all_of.parts, depth) for kind in all_of.types()):
            return True
        return any(self._has_no_option(all_of, i, depth) for i in range(len(all_of.options)))

    def _has_no_value(self, all_of: Flat) -> bool:
        """Whether values are listed of which every one is rejected."""
        if (values := all_of.values()) is None or len(values) > MAX_VALUES:
            return False
        lists = [self._keys_of(listed(part) or [], part) for part in all_of.parts if listed(part) is not None]
        common = frozenset.intersection(*lists)
        self._left -= len(common) * len(all_of.parts)
        left = (value for value in values if key_of(value) in common)
        return all(any(rejects(part, value) for part in all_of.parts) for value in left)

    def _contradict(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        """Whether one part says `not` of another."""
        nots = [part["not"] for part in parts if isinstance(part.get("not"), Mapping)]
        denied = frozenset[str]().union(*(self._keys_of([schema], schema) for schema in nots))
        return bool(denied) and any(key_of(part) in denied for part in parts)

    def _keys_of(self, values: Sequence[Any], owner: Any) -> frozenset[str]:
        """The keys of values, computed once for their owner, which stays alive."""
        known = self._keys.get(id(owner))
        if known is None:
            known = self._keys[id(owner)] = owner, frozenset(map(key_of, values))
        return known[1]

    def _has_no_option(self, all_of: Flat, index: int, depth: int) -> bool:
        """Whether each of a list of options is impossible beside all else."""
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
                return _exceeds(parts, "minLength", "maxLength") or _begins_twice(parts)
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
            members = Flat([*parts]).members(name)
            if members and self._impossible(self.flat(*members), depth + 1):
                return True
        return False


def _forbids(part: Mapping[str, Any], name: str) -> bool:
    is_shut = part.get("additionalProperties") is False and not mapping(part, "patternProperties")
    return is_shut and name not in mapping(part, "properties")


def _begins_twice(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text would have to begin in two ways."""
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
