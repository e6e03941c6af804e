"""Rewriting of JSON Schema keywords that llguidance does not support into equivalent ones that it does.

    canonical document ──> not, oneOf, if, dependent*, contains, ... become anyOf and allOf of plain schemas
                       ──> recursive references with sibling keywords become definitions

Raises `Unenforceable`, naming the part of the schema, if that is impossible or the result would be too large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

from router.text.schema.canonical_form import MAX_SCHEMAS, REFERENCE, Document
from router.text.schema.closed_objects import closed
from router.text.schema.formats import pattern_of
from router.text.schema.keywords import (
    CLOSED,
    EXTRA,
    LISTS,
    MAPS,
    SINGLES,
    TYPES,
    Schema,
    Unenforceable,
    children,
    escaped,
    key_of,
    listed,
    mapping,
    names,
    number,
    rejects,
    sequence,
)
from router.text.schema.logic import MAX_ITEMS, MAX_REFERENCES, FlatSchema, Negation, Proofs, all_of, any_of
from router.text.schema.patterns import has_looks

MAX_REWRITTEN_DEPTH = 120
"""Maximum nesting depth of schemas, including those that the rewriting adds."""
MEMBER_MAPS = ("properties", "patternProperties")
REWRITTEN = (
    "not", "oneOf", "if", "then", "else", "dependentRequired", "dependentSchemas", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "minContains", "maxContains",
    "uniqueItems", CLOSED, EXTRA,
)  # fmt: skip
MAX_CASES = 256
"""Maximum number of `oneOf` cases, which are compared pairwise."""
MAX_MEMBERS = 32
"""Maximum number of required members that are tried as the discriminator of `oneOf` cases."""
MAX_OVERLAPPING = 24
"""Maximum number of `oneOf` cases if some may overlap: each of those needs a `not` of every case it overlaps with."""
MAX_CHOICES = 64
"""Maximum number of member combinations, each of which becomes a separate object schema."""
MAX_CONTAINS_ITEMS = 16
"""Maximum array length for `contains`: one alternative is written per index."""
MAX_UNIQUE = 4
"""Maximum number of distinct values for `uniqueItems`. All orderings are enumerated: 65 arrays for 4 values."""
NO_ARRAY = {"type": [name for name in TYPES if name != "array"]}
MAX_UNROLLED = 20_000
"""Maximum number of schemas created by unrolling the recursive references of one document."""
IN_PLACE = ("allOf", "anyOf")


def enforceable(document: Document, *, lenient: bool = False) -> Document:
    """Rewrite a canonical document with keywords that llguidance enforces, and with closed objects.

    Objects are closed first, with a marker that proofs and negations ignore. With `lenient`, keywords that cannot be
    enforced are dropped. Otherwise they raise `Unenforceable`.
    """
    marked = dict(closed(document.whole()))
    definitions = marked.pop("$defs", {})
    document = _rewritten(replace(document, root=marked, definitions=definitions), lenient=lenient)
    return _without_loops(document)


def _rewritten(document: Document, *, lenient: bool = False) -> Document:
    """Rewrite a document with equivalent keywords that llguidance supports. Raises Unenforceable unless `lenient`."""
    rewriting = _Rewriting(document, lenient)
    definitions = {
        name: rewriting.schema(child, document.pointers.get(name, "#"), 0)
        for name, child in document.definitions.items()
    }
    return Document(rewriting.schema(document.root, "#", 0), definitions)


class _Rewriting:
    def __init__(self, document: Document, lenient: bool) -> None:
        self._document, self._lenient = document, lenient
        self._proofs = Proofs(document)
        self._negation = Negation(document, self._proofs)
        self._left = MAX_SCHEMAS

    def schema(self, schema: Schema, pointer: str, depth: int) -> Schema:
        if not isinstance(schema, Mapping):
            return schema
        self._left -= 1
        if self._left < 0 or depth > MAX_REWRITTEN_DEPTH:
            raise Unenforceable(
                pointer, "the schema is too large or too deeply nested after `oneOf`, `not` and similar are resolved"
            )
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in REWRITTEN:
                continue
            if key in MEMBER_MAPS and isinstance(value, Mapping):
                step = f"{pointer}/{key}"
                found[key] = {n: self.schema(child, f"{step}/{escaped(n)}", depth + 1) for n, child in value.items()}
            elif key in LISTS and isinstance(value, list):
                written = [self.schema(child, f"{pointer}/{key}/{i}", depth + 1) for i, child in enumerate(value)]
                found[key] = [*found.get(key, ()), *written]
            elif key in SINGLES:
                found[key] = self.schema(value, f"{pointer}/{key}", depth + 1)
            elif key == "pattern" and self._lenient and isinstance(value, str) and has_looks(value):
                continue
            elif key == "format" and (pattern := pattern_of(value)):
                found["allOf"] = [*found.get("allOf", ()), {"pattern": pattern}]
            else:
                found[key] = value
        if CLOSED in schema:
            found["additionalProperties"] = False
        more = [each for each in self._replacements(schema, pointer, depth + 1) if each is not True]
        if more:
            found["allOf"] = [*found.get("allOf", ()), *more]
        return found

    def _replacements(self, schema: Mapping[str, Any], pointer: str, depth: int) -> list[Schema]:
        """Return schemas that together replace the keywords that llguidance does not support."""
        found = [self.schema(each, pointer, depth) for each in sequence(schema, EXTRA)]
        for key in (key for key in schema if key in REWRITTEN):
            try:
                if key in ("minProperties", "maxProperties"):
                    found += _property_counts(schema, key, f"{pointer}/{key}")
                else:
                    found += [
                        self.schema(each, pointer, depth) for each in self._equivalents(key, schema, f"{pointer}/{key}")
                    ]
            except Unenforceable:
                if not self._lenient:
                    raise
                if key == "oneOf":
                    found.append(self.schema({"anyOf": schema["oneOf"]}, pointer, depth))
        return found

    def _equivalents(self, key: str, schema: Mapping[str, Any], pointer: str) -> list[Schema]:
        match key:
            case "not":
                context = self._proofs.flat({k: v for k, v in schema.items() if k != "not"})
                return [self._negation.negated(schema["not"], context, pointer)]
            case "oneOf":
                cases = sequence(schema, key)
                return [any_of(_exclusive(cases, _siblings_of_one_of(schema), self._proofs, self._negation, pointer))]
            case "if":
                return self._conditions(schema, pointer)
            case "dependentRequired":
                return list(_dependent_names(schema))
            case "dependentSchemas":
                needed = [(name, child) for name, child in mapping(schema, key).items() if child is not True]
                return [
                    any_of([_without_member(name), all_of([{"required": [name]}, child])]) for name, child in needed
                ]
            case "propertyNames":
                return [_property_names(self._document, schema, pointer)]
            case "unevaluatedProperties":
                return [_evaluated_properties(schema, pointer)]
            case "unevaluatedItems":
                raise Unenforceable(pointer, "`unevaluatedItems` cannot be enforced")
            case "contains":
                return _containing(schema, pointer)
            case "uniqueItems" if schema[key] is True:
                return [_unique_items(schema, self._proofs, pointer)]
        return []

    def _conditions(self, schema: Mapping[str, Any], pointer: str) -> list[Schema]:
        """Rewrite `if`, `then` and `else` as alternatives: condition and `then`, or not condition and `else`."""
        condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
        found: list[Schema] = []
        context = self._proofs.flat({k: v for k, v in schema.items() if k not in ("if", "then", "else")})
        if then is not True:
            fails = self._negation.negated(condition, context, pointer)
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
            found.append({"anyOf": [_without_member(name), {"required": [name, *missing]}]})
    return found


def _without_member(name: str) -> Schema:
    """Return a schema that rejects only objects with this member."""
    return {"properties": {name: False}}


def _exclusive(
    cases: Sequence[Schema], context: Mapping[str, Any], proofs: Proofs, negation: Negation, pointer: str
) -> list[Schema]:
    """Rewrite cases so that at most one matches a value that also matches `context`. Raises Unenforceable."""
    if len(cases) < 2 or _differ_in_a_member(cases, context, proofs):
        return list(cases)
    if len(cases) > MAX_CASES:
        raise Unenforceable(
            pointer, f"more than {MAX_CASES} cases of a `oneOf` without a required member that distinguishes them"
        )
    overlapping = _overlapping_cases(cases, context, proofs)
    if overlapping and len(cases) > MAX_OVERLAPPING:
        raise Unenforceable(pointer, f"more than {MAX_OVERLAPPING} cases of a `oneOf` of which some may overlap")
    found = []
    for i, case in enumerate(cases):
        flat = proofs.flat(case, context)
        others = [j for j in range(len(cases)) if (min(i, j), max(i, j)) in overlapping]
        denied = (_denied(cases[j], flat, negation, f"{pointer}/{j}") for j in others)
        found.append(all_of([case, *denied]))
    return found


def _denied(case: Schema, context: FlatSchema, negation: Negation, pointer: str) -> Schema:
    try:
        return negation.negated(case, context, pointer)
    except Unenforceable as error:
        raise Unenforceable(pointer, f"this case of a `oneOf` may overlap with another, and {error.why}") from error


def _overlapping_cases(cases: Sequence[Schema], context: Mapping[str, Any], proofs: Proofs) -> set[tuple[int, int]]:
    """Return the pairs of cases that may both match a value."""
    return {
        (j, i) for i in range(len(cases)) for j in range(i) if not proofs.is_impossible(cases[i], cases[j], context)
    }


def _differ_in_a_member(cases: Sequence[Schema], context: Mapping[str, Any], proofs: Proofs) -> bool:
    """Whether all cases are objects with a required discriminator member whose listed values are disjoint."""
    flats = [proofs.flat(case, context) for case in cases]
    required = [frozenset(name for part in flat.parts for name in names(part)) for flat in flats]
    if any(flat.types() != {"object"} for flat in flats):
        return False
    candidates = sorted(frozenset.intersection(*required))[:MAX_MEMBERS]
    return any(_is_discriminator(name, flats) for name in candidates)


def _is_discriminator(name: str, flats: Sequence[FlatSchema]) -> bool:
    seen: set[str] = set()
    for flat in flats:
        values = next((values for child in flat.members(name) if (values := listed(child)) is not None), None)
        if values is None or not seen.isdisjoint(own := set(map(key_of, values))):
            return False
        seen |= own
    return True


def _siblings_of_one_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "oneOf"}


def _property_counts(schema: Mapping[str, Any], key: str, pointer: str) -> list[Schema]:
    """Rewrite `minProperties` or `maxProperties` (`key`) in a form that llguidance enforces. Raises Unenforceable.

    The result requires or forbids members by name, or counts only unnamed members.
    """
    bound = number(schema, key)
    if bound is None:
        return [{key: schema[key]}]  # llguidance reports the invalid value
    required = dict.fromkeys(names(schema))
    optional = [n for n, child in mapping(schema, "properties").items() if child is not False and n not in required]
    is_closed = CLOSED in schema or schema.get("additionalProperties") is False
    is_closed = is_closed and not mapping(schema, "patternProperties")
    more = int(bound) - len(required)
    if key == "minProperties":
        return [_at_least(int(bound), more, optional, is_closed, pointer)] if more > 0 else []
    return [_at_most(int(bound), more, optional, is_closed, pointer)]


def _at_least(least: int, more: int, optional: list[str], is_closed: bool, pointer: str) -> Schema:
    """Require `least` members: all required ones and `more` others."""
    if not is_closed and more > 1:
        why = f"minProperties {least} cannot be enforced for members without names: a name could be repeated"
        raise Unenforceable(pointer, why)
    ways: list[Schema] = [{"required": list(chosen)} for chosen in _choices(optional, more, "minProperties", pointer)]
    if not is_closed:
        ways.append({**_none_of(optional), "minProperties": least})
    return any_of(ways)


def _at_most(most: int, more: int, optional: list[str], is_closed: bool, pointer: str) -> Schema:
    """Allow up to `most` members: all required ones and up to `more` others."""
    if more < 0:
        return {"maxProperties": most}  # llguidance reports that it is unsatisfiable
    if is_closed:
        if more >= len(optional):
            return True
        chosen = _choices(optional, more, "maxProperties", pointer)
        return any_of(_none_of([n for n in optional if n not in kept]) for kept in chosen)
    ways: list[Schema] = []
    for size in range(min(more, len(optional)) + 1):
        for kept in _choices(optional, size, "maxProperties", pointer):
            others = _none_of([n for n in optional if n not in kept])
            ways.append({**others, "required": list(kept), "maxProperties": most})
    return any_of(ways)


def _none_of(members: list[str]) -> dict[str, Schema]:
    return {"properties": dict.fromkeys(members, False)} if members else {}


def _choices(optional: list[str], size: int, key: str, pointer: str) -> list[tuple[str, ...]]:
    if math.comb(len(optional), size) > MAX_CHOICES:
        raise Unenforceable(
            pointer, f"{key} allows more than {MAX_CHOICES} ways to choose among {len(optional)} members"
        )
    return list(combinations(optional, size))


def _property_names(document: Document, schema: Mapping[str, Any], pointer: str) -> Schema:
    """Rewrite `propertyNames` as a schema of the object. Raises Unenforceable."""
    if mapping(schema, "patternProperties"):
        raise Unenforceable(pointer, "`propertyNames` together with `patternProperties` cannot be enforced")
    return _named(document, schema["propertyNames"], pointer)


def _named(document: Document, wanted: Schema, pointer: str) -> Schema:
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
            raise Unenforceable(pointer, "`propertyNames` with both listed names and other keywords cannot be enforced")
        known = [value for value in values if isinstance(value, str) and not rejects(rest, value)]
        return {"properties": dict.fromkeys(known, True), "additionalProperties": False}
    said = [key for key in wanted if key != "type"]
    if not said:
        return True
    if said == ["not"]:
        return _not_named(wanted["not"], pointer)
    if said == ["allOf"]:
        return all_of(_named(document, each, pointer) for each in wanted["allOf"])
    if said == ["pattern"] and isinstance(wanted["pattern"], str):
        pattern = wanted["pattern"]
    elif said == ["format"] and (defined := pattern_of(wanted["format"])):
        pattern = defined
    elif not set(said) - {"minLength", "maxLength"}:
        least, most = int(number(wanted, "minLength") or 0), number(wanted, "maxLength")
        pattern = rf"^[\s\S]{{{least},{'' if most is None else int(most)}}}$"
    else:
        raise Unenforceable(pointer, f"`propertyNames` with {', '.join(f'`{key}`' for key in said)} cannot be enforced")
    return {"patternProperties": {pattern: True}, "additionalProperties": False}


def _not_named(denied: Schema, pointer: str) -> Schema:
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
    raise Unenforceable(pointer, "`propertyNames` with this `not` cannot be enforced")


def _evaluated_properties(schema: Mapping[str, Any], pointer: str) -> Schema:
    """Rewrite `unevaluatedProperties` of an object that no other schema describes. Raises Unenforceable."""
    if schema["unevaluatedProperties"] in (True, {}):
        return True
    if any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")):
        raise Unenforceable(
            pointer, "`unevaluatedProperties` of an object described by several schemas cannot be enforced"
        )
    if "additionalProperties" in schema:
        return True
    named = {key: schema[key] for key in ("properties", "patternProperties") if key in schema}
    return {**_any(named), "additionalProperties": schema["unevaluatedProperties"]}


def _any(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same keywords with every schema replaced by `True`."""
    return {key: dict.fromkeys(value, True) if isinstance(value, Mapping) else value for key, value in named.items()}


def _containing(schema: Mapping[str, Any], pointer: str) -> list[Schema]:
    """Rewrite `contains` and its bounds. Raises Unenforceable."""
    wanted, least, most = schema["contains"], number(schema, "minContains"), number(schema, "maxContains")
    least = 1 if least is None else int(least)
    if wanted is True or wanted == {}:
        return [{"minItems": least}, *([] if most is None else [{"maxItems": int(most)}])]
    if most is not None:
        raise Unenforceable(pointer, "`maxContains` cannot be enforced")
    if least == 0:
        return []
    longest = number(schema, "maxItems")
    if least > 1 or longest is None or longest > MAX_CONTAINS_ITEMS:
        what = "`contains`" if least == 1 else f"`minContains` {least}"
        raise Unenforceable(
            pointer, f"{what} can only be enforced for 1 of at most {MAX_CONTAINS_ITEMS} items (`maxItems`)"
        )
    ways = [{"prefixItems": [*[True] * i, wanted], "minItems": i + 1} for i in range(int(longest))]
    return [any_of([NO_ARRAY, *({"type": "array", **way} for way in ways)])]


def _unique_items(schema: Mapping[str, Any], proofs: Proofs, pointer: str) -> Schema:
    """Rewrite `uniqueItems`. Raises Unenforceable."""
    longest, first, items = number(schema, "maxItems"), sequence(schema, "prefixItems"), schema.get("items", True)
    if items is False:
        longest = len(first) if longest is None else min(longest, len(first))
    if longest is not None and longest <= 1:
        return True
    if longest is not None and longest <= min(len(first), MAX_ITEMS):
        heads = first[: int(longest)]
        if all(proofs.is_impossible(a, b) for i, a in enumerate(heads) for b in heads[:i]):
            return True
    values = _item_values(items)
    if values is None or len(values) > MAX_UNIQUE or first:
        why = f"`uniqueItems` can only be enforced for items with at most {MAX_UNIQUE} listed values, or a single item"
        raise Unenforceable(pointer, why)
    sizes = range(min(len(values), int(len(values) if longest is None else longest)) + 1)
    return any_of([NO_ARRAY, {"enum": [list(order) for size in sizes for order in permutations(values, size)]}])


def _item_values(items: Schema) -> list[Any] | None:
    """Return the distinct values that items may have, or None if they are not enumerated."""
    found = listed(items)
    if found is None and isinstance(items, Mapping):
        by_type: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
        found = by_type.get(str(items.get("type")))
    return None if found is None else list({key_of(value): value for value in found}.values())


def _without_loops(document: Document) -> Document:
    """Remove recursive references that have sibling keywords, without changing the schema. Raises Unenforceable.

        node: {"$ref": "#/$defs/tree", "required": ["kind"]}     tree: {..., "properties": {"child": node}}

    llguidance does not follow such a reference. It becomes a definition in which its target is inlined once. Deeper
    levels refer to the new definition:

        site: {"allOf": [{..., "properties": {"child": {"$ref": site}}}, {"required": ["kind"]}]}
    """
    cyclic = _cyclic(document)
    return _Unrolling(document, cyclic).whole() if cyclic else document


class _Unrolling:
    def __init__(self, document: Document, cyclic: frozenset[str]) -> None:
        self._document, self._cyclic = document, cyclic
        self._names: dict[int, tuple[Schema, str]] = {}
        self._sites: list[tuple[str, Schema]] = []
        self._inlined: list[str] = []
        self._left = MAX_UNROLLED

    def whole(self) -> Document:
        definitions = {name: self._separate(schema) for name, schema in self._document.definitions.items()}
        root = self._separate(self._document.root)
        while self._sites:
            name, schema = self._sites.pop()
            definitions[name] = self._parts(schema, has_siblings=True)
        return Document(root, definitions)

    def _separate(self, schema: Schema) -> Schema:
        """Unroll a schema that is the only one describing its value."""
        if not isinstance(schema, Mapping):
            return schema
        if not (_is_joint(schema) and self._is_recursive(schema)):
            return self._parts(schema, has_siblings=False)
        if id(schema) not in self._names:
            self._names[id(schema)] = schema, f"site{len(self._names)}"
            self._sites.append((self._names[id(schema)][1], schema))
        return {"$ref": REFERENCE + self._names[id(schema)][1]}

    def _parts(self, schema: Mapping[str, Any], *, has_siblings: bool) -> Schema:
        """Unroll the parts of a schema. `has_siblings`: other schemas describe the same value."""
        self._left -= 1
        if self._left < 0:
            raise Unenforceable("#", f"recursive references with sibling keywords have over {MAX_UNROLLED:,} parts")
        joint = has_siblings or _is_joint(schema)
        found: dict[str, Any] = {}
        more: list[Schema] = []
        for key, value in schema.items():
            if key == "$ref" and joint and self._is_new(value):
                more.append(self._target(value))
            elif key in MAPS:
                found[key] = {name: self._separate(child) for name, child in value.items()}
            elif key in IN_PLACE:
                found[key] = [self._joined(child) if joint else self._separate(child) for child in value]
            elif key in LISTS:
                found[key] = [self._separate(child) for child in value]
            elif key in SINGLES:
                found[key] = self._separate(value)
            else:
                found[key] = value
        return {**found, "allOf": [*found.get("allOf", ()), *more]} if more else found

    def _joined(self, schema: Schema) -> Schema:
        return self._parts(schema, has_siblings=True) if isinstance(schema, Mapping) else schema

    def _is_new(self, reference: str) -> bool:
        name = reference.removeprefix(REFERENCE)
        return name in self._cyclic and name not in self._inlined

    def _target(self, reference: str) -> Schema:
        self._inlined.append(reference.removeprefix(REFERENCE))
        found = self._joined(self._document.target(reference))
        self._inlined.pop()
        return found

    def _is_recursive(self, schema: Schema) -> bool:
        """Whether a schema refers, for the same value, to a recursive definition."""
        left = [schema]
        while left:
            here = left.pop()
            if isinstance(here, Mapping):
                if "$ref" in here and here["$ref"].removeprefix(REFERENCE) in self._cyclic:
                    return True
                left += [child for key in IN_PLACE for child in here.get(key, ())]
        return False


def _is_joint(schema: Mapping[str, Any]) -> bool:
    """Whether more than one schema describes a value of this schema."""
    return len(schema) > 1 or len(schema.get("allOf", ())) > 1


def _cyclic(document: Document) -> frozenset[str]:
    """Return the names of recursive definitions."""
    leads = {name: _references(schema) for name, schema in document.definitions.items()}
    return frozenset(name for name in leads if name in _reachable(leads, name))


def _reachable(leads: Mapping[str, set[str]], name: str) -> set[str]:
    found: set[str] = set()
    left = [*leads[name]]
    while left:
        if (here := left.pop()) not in found:
            found.add(here)
            left += leads[here]
    return found


def _references(schema: Schema) -> set[str]:
    found: set[str] = set()
    left = [schema]
    while left:
        here = left.pop()
        if isinstance(here, Mapping):
            if "$ref" in here:
                found.add(here["$ref"].removeprefix(REFERENCE))
            left += [child for _, child in children(here)]
    return found
