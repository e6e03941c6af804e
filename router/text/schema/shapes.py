"""Analysis of a schema by type, for tool-call formats whose arguments are not JSON.

    {"anyOf": [{"$ref": "#/$defs/0"}, {"type": "null"}]}  ->  a case for objects, and a case for null

The document must be canonical and rewritten to the keywords that llguidance supports.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import Any, Final

from router.text.schema.canonical_form import REFERENCE, Document
from router.text.schema.keywords import (
    TYPES,
    Schema,
    Unenforceable,
    children,
    is_finite,
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
from router.text.schema.logic import Proofs, any_of
from router.text.schema.patterns import LEXERS_KEPT, matches

MAX_COMBINATIONS = 256
"""Maximum number of cases of one value. Further alternatives are ignored, so the grammar accepts more."""
MAX_OVERLAPPING_PATTERNS = 3
"""Maximum number of name patterns whose combinations are distinguished. With more, each applies separately."""
MAX_COUNTED = 6
"""Maximum number of optional members for which a member count is expanded to one shape per combination."""
MAX_COMPARED_DEPTH = 64
"""Maximum nesting depth at which values are compared with schemas."""
MAX_COMPARISON_STEPS = 50_000
"""Maximum number of steps of one comparison of a value with schemas, which runs on the event loop.

A step is the comparison of a value with a schema. All together take a tenth of a second, or most of a second with the
slowest patterns.
"""
PATTERN_STEPS = MAX_COMPARISON_STEPS // LEXERS_KEPT
"""Steps of compiling a pattern. The cache is large enough for the patterns of one comparison."""
CHARACTER_STEPS = 2
"""Steps of comparing one character of a text with a pattern."""
PART_STEPS = 8
"""Steps of finding a case, for each of its parts."""
MEMBERS_PER_STEP = 64
"""Number of items or members that are counted in one step."""
STRUCTURE: Final = frozenset(("$ref", "allOf", "anyOf", "$defs"))
PARTS: Final = frozenset(
    ("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "required")
)

Schemas = tuple[Schema, ...]
"""Schemas that one value must all match."""


@dataclass(frozen=True, slots=True)
class Case:
    """One alternative of a value.

    `parts` all apply and contain no references or alternatives. `types` are the possible types. `values` are the
    possible values, if they are enumerated.
    """

    parts: tuple[Mapping[str, Any], ...]
    types: frozenset[str]
    values: tuple[Any, ...] | None = None

    @property
    def is_any(self) -> bool:
        """Whether every value matches."""
        return not self.parts

    @property
    def is_whole(self) -> bool:
        """Whether all numbers of this case are integers."""
        return any("integer" in (kinds := _kinds(part)) and "number" not in kinds for part in self.parts)

    def least(self, key: str) -> float | None:
        """Return the smallest value of a bound; for upper bounds, the effective one."""
        return min(self._bounds(key), default=None)

    def most(self, key: str) -> float | None:
        """Return the largest value of a bound; for lower bounds, the effective one."""
        return max(self._bounds(key), default=None)

    def keywords(self, *keys: str) -> list[dict[str, Any]]:
        """Return, for each part that has any of these keywords, the keywords."""
        found = [{key: part[key] for key in keys if key in part} for part in self.parts]
        return [each for each in found if each]

    def _bounds(self, key: str) -> list[float]:
        return [bound for part in self.parts if (bound := number(part, key)) is not None]


@dataclass(frozen=True, slots=True)
class UnlistedMembers:
    """Schemas of unlisted members whose names match all of `patterns` and none of `without`."""

    patterns: tuple[str, ...]
    without: tuple[str, ...]
    schemas: Schemas


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """Members of an object: the `named` members in order, then `least` to `most` members of the `unnamed` kinds.

    Unnamed members must not have a name in `taken`.
    """

    named: Mapping[str, Schemas]
    required: frozenset[str]
    taken: tuple[str, ...]
    unnamed: tuple[UnlistedMembers, ...]
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Items of an array: the `first` items, each with its schemas, then `others`."""

    first: tuple[Schemas, ...]
    others: Schemas
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Alternatives:
    """An `anyOf`, and the schemas that contain or refer to it."""

    options: Sequence[Schema]
    ancestors: frozenset[int]


class _UsedUpError(Exception):
    """The comparison has used up its steps."""


class Shapes:
    """Cases and shapes of the values of one document.

    Finding cases may take exponential time. The compiler process, which has limits, first finds those of the arguments.
    Comparisons of nested values need further ones, so they have a limit.
    """

    def __init__(self, document: Document) -> None:
        self.document, self.root = document, document.root
        self._proofs = Proofs(document)
        self._cases: dict[tuple[int, ...], tuple[Schemas, tuple[Case, ...]]] = {}
        self._plain: dict[int, tuple[Schema, dict[str, Any]]] = {}
        self._equal: dict[str, dict[str, Any]] = {}
        self._objects: dict[int, tuple[Case, tuple[ObjectShape, ...]]] = {}
        self._arrays: dict[int, tuple[Case, ArrayShape | None]] = {}
        self._value_keys: dict[int, tuple[Case, frozenset[str]]] = {}
        self._left = math.inf  # steps of the comparison in progress
        self._compared: dict[tuple[int, ...], bool] = {}
        self._patterns: set[str] = set()

    def cases(self, *schemas: Schema) -> tuple[Case, ...]:
        """Return the cases of a value that must match all schemas; empty if nothing can match."""
        key = tuple(map(id, schemas))
        if key not in self._cases:
            self._cases[key] = schemas, tuple(self._found_cases(schemas))
        return self._cases[key][1]

    def object_shapes(self, case: Case) -> tuple[ObjectShape, ...]:
        """Return the shapes of a case's objects; empty if it has no objects."""
        if id(case) not in self._objects:
            self._objects[id(case)] = case, tuple(self._found_objects(case)) if "object" in case.types else ()
        return self._objects[id(case)][1]

    @cached_property
    def root_objects(self) -> list[ObjectShape]:
        """The shapes of all objects that match the root. Raises Unenforceable if no object does."""
        found: list[ObjectShape] = []
        for case in self.cases(self.root):
            if case.values is not None:
                found += [_only(value) for value in case.values if isinstance(value, Mapping)]
            else:
                found += self.object_shapes(case)
        if not found:
            raise Unenforceable("#", "no object matches this schema")
        return found

    def narrowed(self, cases: Sequence[Case], types: frozenset[str]) -> Schema:
        """Return a schema of the cases' values, restricted to these types."""
        return any_of([_joined(case, types) for case in cases if case.types & types])

    def document_of(self, schema: Schema) -> Document:
        """Create a document of a schema and the definitions that it uses, directly or indirectly."""
        return Document(schema, self._reachable(schema))

    def array_shape(self, case: Case) -> ArrayShape | None:
        """Return the shape of a case's arrays, or None if it has no arrays."""
        if id(case) not in self._arrays:
            self._arrays[id(case)] = case, self._found_array(case) if "array" in case.types else None
        return self._arrays[id(case)][1]

    def members(self, name: str) -> list[Schemas]:
        """Return the alternatives for the root's member of this name."""
        found: list[Schemas] = []
        for shape in self.root_objects:
            if name in shape.named:
                found.append(shape.named[name])
            elif name not in shape.taken:
                found += [kind.schemas for kind in shape.unnamed if self._is_named(kind, name)]
        return found

    def accepts(self, value: Any, *alternatives: Schemas) -> bool:
        """Whether a JSON value matches all schemas of an alternative. Ignores formats and unsupported patterns.

        False if that takes more than `MAX_COMPARISON_STEPS`.
        """
        self._left = MAX_COMPARISON_STEPS
        try:
            return any(self._is_accepted(value, schemas, 0) for schemas in alternatives)
        except _UsedUpError:
            return False
        finally:
            self._left = math.inf
            self._compared.clear()  # the ids of its values may be reused
            self._patterns.clear()

    def _reachable(self, schema: Schema) -> dict[str, Schema]:
        """Return the definitions that a schema uses, directly or indirectly."""
        found: dict[str, Schema] = {}
        left = [schema]
        while left:
            here = left.pop()
            if not isinstance(here, Mapping):
                continue
            if "$ref" in here and (name := here["$ref"].removeprefix(REFERENCE)) not in found:
                found[name] = self.document.definitions[name]
                left.append(found[name])
            left += [child for _, child in children(here)]
        return found

    def _found_cases(self, schemas: Schemas) -> Iterator[Case]:
        flat = self._flat(schemas, frozenset())
        if flat is None:
            return
        parts, options = flat
        found: list[list[Mapping[str, Any]]] = []
        while not self._expand(parts, options, found):
            found.clear()
            options = options[:-1]
        for each in {frozenset(map(id, each)): each for each in found}.values():
            case = self._case(each)
            if case is not None:
                yield case

    def _flat(
        self, schemas: Schemas, choices: frozenset[int]
    ) -> tuple[list[Mapping[str, Any]], list[_Alternatives]] | None:
        """Return the parts and alternatives of schemas, or None if nothing matches. `choices` were chosen before."""
        parts: list[Mapping[str, Any]] = []
        options: list[_Alternatives] = []
        left = [(schema, frozenset[int]()) for schema in reversed(schemas)]
        seen: set[int] = set()
        while left:
            schema, ancestors = left.pop()
            self._spend()
            if schema is False or id(schema) in choices:  # a choice that contains itself adds no values
                return None
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            ancestors |= {id(schema)}
            if plain := self._plain_of(schema):
                parts.append(plain)
            left += [(each, ancestors) for each in reversed(sequence(schema, "allOf"))]
            if "$ref" in schema:
                left.append((self.document.target(schema["$ref"]), ancestors))
            if "anyOf" in schema:
                options.append(_Alternatives(sequence(schema, "anyOf"), choices | ancestors))
        return parts, options

    def _expand(
        self, parts: list[Mapping[str, Any]], options: list[_Alternatives], found: list[list[Mapping[str, Any]]]
    ) -> bool:
        """Add the parts of each combination of options to `found`. Return False if there are too many."""
        if not options:
            found.append(parts)
            return len(found) <= MAX_COMBINATIONS
        first, *rest = options
        for option in first.options:
            flat = self._flat((option,), first.ancestors)
            if flat is not None and not self._expand([*parts, *flat[0]], [*rest, *flat[1]], found):
                return False
        return True

    def _plain_of(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keywords without structural ones. Schemas with equal scalar keywords share one object."""
        if id(schema) not in self._plain:
            plain = {key: each for key, each in schema.items() if key not in STRUCTURE}
            if not any(isinstance(each, Mapping) for each in plain.values()):
                plain = self._equal.setdefault(key_of(plain), plain)
            self._plain[id(schema)] = schema, plain
        return self._plain[id(schema)][1]

    def _case(self, found: list[Mapping[str, Any]]) -> Case | None:
        parts = tuple({id(part): part for part in found}.values())
        self._spend(PART_STEPS * len(parts))
        types = frozenset(TYPES).intersection(*map(types_of, parts))
        if not types or (parts and self._proofs.is_impossible(*parts)):
            return None
        lists = [values for part in parts if (values := listed(part)) is not None]
        if not lists:
            return Case(parts, types)
        self._spend(sum(map(len, lists)))
        unlisted = Case(tuple({k: v for k, v in p.items() if k not in ("enum", "const")} for p in parts), types)
        common = frozenset.intersection(*(frozenset(map(key_of, each)) for each in lists))
        distinct = {key: value for value in lists[0] if (key := key_of(value)) in common}
        kept = tuple(value for value in distinct.values() if self._accepts(value, unlisted, 0))
        return Case(parts, frozenset(map(type_of, kept)), kept) if kept else None

    def _found_objects(self, case: Case) -> Iterator[ObjectShape]:
        known = dict.fromkeys(name for part in case.parts for name in mapping(part, "properties"))
        required = dict.fromkeys(name for part in case.parts for name in names(part))
        schemas = {
            name: _essential(each for part in case.parts for each in self._of_name(part, name))
            for name in {**known, **required}
        }
        named = {name: each for name, each in schemas.items() if self.cases(*each)}
        if any(name not in named for name in required):
            return
        unnamed, taken = tuple(self._unnamed(case.parts)), tuple(schemas)
        smallest, largest = case.most("minProperties") or 0, case.least("maxProperties")
        optional = [name for name in named if name not in required]
        if not optional or len(optional) > MAX_COUNTED or (smallest <= len(required) and largest is None):
            choices: list[Collection[str]] = [optional]
            is_counted = not optional
        else:  # each choice of members is a shape that requires all of them
            choices = [some for size in range(len(optional) + 1) for some in combinations(optional, size)]
            is_counted = True
        for some in choices:
            chosen = {name: each for name, each in named.items() if name in required or name in some}
            least = int(smallest) - len(chosen) if is_counted else 0
            most = None if largest is None or not is_counted else int(largest) - len(chosen)
            most = most if unnamed else 0 if most is None else min(0, most)
            if most is None or most >= max(0, least):
                whole = frozenset(chosen) if is_counted else frozenset(required)
                yield ObjectShape(chosen, whole, taken, unnamed if most != 0 else (), max(0, least), most)

    def _unnamed(self, parts: Sequence[Mapping[str, Any]]) -> Iterator[UnlistedMembers]:
        patterns = tuple(dict.fromkeys(p for part in parts for p in mapping(part, "patternProperties")))
        if len(patterns) > MAX_OVERLAPPING_PATTERNS:
            chosen: list[tuple[str, ...]] = [*((pattern,) for pattern in patterns), ()]
        else:
            chosen = [
                tuple(p for i, p in enumerate(patterns) if bits >> i & 1)
                for bits in reversed(range(1 << len(patterns)))
            ]
        for some in chosen:
            alone = len(patterns) > MAX_OVERLAPPING_PATTERNS and some
            without = () if alone else tuple(pattern for pattern in patterns if pattern not in some)
            schemas = _essential(each for part in parts for each in _of_patterns(part, some))
            if self.cases(*schemas):
                yield UnlistedMembers(some, without, schemas)

    def _found_array(self, case: Case) -> ArrayShape | None:
        length = max((len(sequence(part, "prefixItems")) for part in case.parts), default=0)
        self._spend(length)
        first = [_essential(_item(part, i) for part in case.parts) for i in range(length)]
        others = _essential(part.get("items", True) for part in case.parts)
        least, most = int(case.most("minItems") or 0), case.least("maxItems")
        impossible = next((i for i, each in enumerate([*first, others]) if not self.cases(*each)), None)
        if impossible is not None:
            first, most = first[:impossible], impossible if most is None else min(most, impossible)
        if most is not None and most < least:
            return None
        return ArrayShape(tuple(first), others, least, None if most is None else int(most))

    def _of_name(self, part: Mapping[str, Any], name: str) -> Iterator[Schema]:
        """Yield a part's schemas for the member `name`."""
        self._spend()
        patterns = mapping(part, "patternProperties").items()
        found = [child for pattern, child in patterns if self._matches(pattern, name)]
        known = mapping(part, "properties")
        if name in known:
            found.append(known[name])
        yield from found or [part.get("additionalProperties", True)]

    def _is_named(self, kind: UnlistedMembers, name: str) -> bool:
        return all(self._matches(p, name) for p in kind.patterns) and not any(
            self._matches(p, name) for p in kind.without
        )

    # ------------------------------------------------------------ comparison

    def _spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise _UsedUpError

    def _matches(self, pattern: str, text: str) -> bool:
        self._spend(CHARACTER_STEPS * len(text) + (0 if pattern in self._patterns else PATTERN_STEPS))
        self._patterns.add(pattern)
        return matches(pattern, text)

    def _is_accepted(self, value: Any, schemas: Schemas, depth: int) -> bool:
        """Whether a value matches all schemas. Results are kept, or nested alternatives would multiply the work."""
        if depth > MAX_COMPARED_DEPTH:
            return True
        self._spend()
        key = (id(value), *map(id, schemas))
        if key not in self._compared:
            self._compared[key] = any(self._accepts(value, case, depth) for case in self.cases(*schemas))
        return self._compared[key]

    def _accepts(self, value: Any, case: Case, depth: int) -> bool:
        kind = type_of(value)
        self._spend(1 + (len(value) // MEMBERS_PER_STEP if isinstance(value, list | Mapping) else 0))
        if kind not in case.types:
            return False
        if case.values is not None:
            return key_of(value) in self._keys_of(case)
        own = ({key: each for key, each in part.items() if key not in PARTS} for part in case.parts)
        if any(rejects(part, value) for part in own):
            return False
        match kind:
            case "number":
                return all(_divides(each["multipleOf"], value) for each in case.keywords("multipleOf"))
            case "string":
                return all(self._matches(each["pattern"], value) for each in case.keywords("pattern"))
            case "array":
                shape = self.array_shape(case)
                return shape is not None and self._accepts_items(value, shape, depth)
            case "object":
                return any(self._accepts_members(value, shape, depth) for shape in self.object_shapes(case))
        return True

    def _keys_of(self, case: Case) -> frozenset[str]:
        """Return the keys of a case's values."""
        if id(case) not in self._value_keys:
            values = case.values or ()
            self._spend(len(values))
            self._value_keys[id(case)] = case, frozenset(map(key_of, values))
        return self._value_keys[id(case)][1]

    def _accepts_items(self, value: list[Any], shape: ArrayShape, depth: int) -> bool:
        if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
            return False
        wanted = [*shape.first, *[shape.others] * max(0, len(value) - len(shape.first))]
        return all(self._is_accepted(item, each, depth + 1) for item, each in zip(value, wanted, strict=False))

    def _accepts_members(self, value: Mapping[str, Any], shape: ObjectShape, depth: int) -> bool:
        self._spend(1 + (len(value) + len(shape.named)) // MEMBERS_PER_STEP)
        if any(name not in value for name in shape.required):
            return False
        others = [name for name in value if name not in shape.named]
        if len(others) < shape.least or (shape.most is not None and len(others) > shape.most):
            return False
        if not all(self._is_accepted(value[n], each, depth + 1) for n, each in shape.named.items() if n in value):
            return False
        return all(
            name not in shape.taken
            and any(
                self._is_named(k, name) and self._is_accepted(value[name], k.schemas, depth + 1) for k in shape.unnamed
            )
            for name in others
        )


def _only(value: Mapping[str, Any]) -> ObjectShape:
    """Return the shape that matches exactly this object."""
    named: dict[str, Schemas] = {name: ({"const": each},) for name, each in value.items()}
    return ObjectShape(named, frozenset(value), tuple(value), (), 0, 0)


def _joined(case: Case, types: frozenset[str]) -> Schema:
    kept = case.types & types
    parts = list(case.parts) if kept == case.types and case.parts else [*case.parts, {"type": sorted(kept)}]
    return parts[0] if len(parts) == 1 else {"allOf": parts}


def _kinds(part: Mapping[str, Any]) -> Sequence[Any]:
    kinds = part.get("type", ())
    return [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else ()


def _essential(schemas: Any) -> Schemas:
    """Return the schemas without those that match everything."""
    return tuple(schema for schema in schemas if schema is not True and schema != {})


def _item(part: Mapping[str, Any], index: int) -> Schema:
    first = sequence(part, "prefixItems")
    return first[index] if index < len(first) else part.get("items", True)


def _of_patterns(part: Mapping[str, Any], patterns: Sequence[str]) -> Iterator[Schema]:
    """Yield a part's schemas for an unlisted member whose name matches these patterns."""
    known = mapping(part, "patternProperties")
    yield from [known[pattern] for pattern in patterns if pattern in known] or [part.get("additionalProperties", True)]


def _divides(divisor: Any, value: float) -> bool:
    if not isinstance(divisor, int | float) or divisor <= 0 or not is_finite(divisor):
        return True
    return is_finite(value) and _exact(value) % _exact(divisor) == 0


def _exact(value: float) -> Fraction:
    """Return the number that a float is written as: 0.01, not the nearest binary fraction."""
    return Fraction(value) if isinstance(value, int) else Fraction(str(value))
