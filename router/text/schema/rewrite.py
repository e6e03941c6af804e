"""Rewrites the keywords that llguidance does not know in those that it knows, so that exactly the same values match.

    canonical document ──> not, oneOf, if, dependent*, contains, ... become anyOf and allOf of plain schemas
                       ──> references beside other keywords that lead back to themselves become definitions

Where that is impossible, or would take too much, `Unenforceable` says which part of the schema is the cause.
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
from router.text.schema.logic import MAX_ITEMS, MAX_REFERENCES, Flat, Negation, Proofs, all_of, any_of
from router.text.schema.patterns import has_looks

MAX_REWRITTEN_DEPTH = 120
"""Of schemas within schemas, those that rewriting adds included."""
MEMBER_MAPS = ("properties", "patternProperties")
REWRITTEN = (
    "not", "oneOf", "if", "then", "else", "dependentRequired", "dependentSchemas", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "minContains", "maxContains",
    "uniqueItems", CLOSED, EXTRA,
)  # fmt: skip
MAX_CASES = 256
"""Each two of them are compared."""
MAX_MEMBERS = 32
"""Required members, one of which may tell all cases apart."""
MAX_OVERLAPPING = 24
"""Cases of which some may overlap: each of them then says `not` of those others."""
MAX_CHOICES = 64
"""Ways to choose members, each of which becomes an object of its own."""
MAX_PLACES = 16
"""Of an item that an array must contain."""
MAX_UNIQUE = 4
"""Values whose every order is written out: 64 arrays."""
NO_ARRAY = {"type": [name for name in TYPES if name != "array"]}
MAX_UNROLLED = 20_000
"""That writing out may make of one document."""
IN_PLACE = ("allOf", "anyOf")


def enforceable(document: Document, *, lenient: bool = False) -> Document:
    """Rewrite a canonical document in keywords that the library enforces, with closed objects.

    Objects are closed before `oneOf` and `not` are resolved, by a mark that says nothing of what the schema rejects.
    With `lenient`, keywords that cannot be enforced are ignored. Otherwise they raise Unenforceable, a ValueError.
    """
    marked = dict(closed(document.whole()))
    definitions = marked.pop("$defs", {})
    document = _rewritten(replace(document, root=marked, definitions=definitions), lenient=lenient)
    return _without_loops(document)


def _rewritten(document: Document, *, lenient: bool = False) -> Document:
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
            if key in MEMBER_MAPS and isinstance(value, Mapping):
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
                    found += _property_counts(schema, key, f"{place}/{key}")
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
                return [any_of(_exclusive(cases, _beside_one_of(schema), self._proofs, self._negation, place))]
            case "if":
                return self._conditions(schema, place)
            case "dependentRequired":
                return list(_dependent_names(schema))
            case "dependentSchemas":
                needed = [(name, child) for name, child in mapping(schema, key).items() if child is not True]
                return [any_of([_lacks(name), all_of([{"required": [name]}, child])]) for name, child in needed]
            case "propertyNames":
                return [_property_names(self._document, schema, place)]
            case "unevaluatedProperties":
                return [_evaluated_properties(schema, place)]
            case "unevaluatedItems":
                raise Unenforceable(place, "`unevaluatedItems` cannot be enforced")
            case "contains":
                return _containing(schema, place)
            case "uniqueItems" if schema[key] is True:
                return [_unique_items(schema, self._proofs, place)]
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


def _exclusive(
    cases: Sequence[Schema], beside: Mapping[str, Any], proofs: Proofs, negation: Negation, place: str
) -> list[Schema]:
    """Cases of which exactly one matches where one matches, given all that is `beside` them. Raises Unenforceable."""
    if len(cases) < 2 or _differ_in_a_member(cases, beside, proofs):
        return list(cases)
    if len(cases) > MAX_CASES:
        raise Unenforceable(
            place, f"more than {MAX_CASES} cases of a `oneOf` without a required member that tells them apart"
        )
    overlapping = _overlapping_cases(cases, beside, proofs)
    if overlapping and len(cases) > MAX_OVERLAPPING:
        raise Unenforceable(place, f"more than {MAX_OVERLAPPING} cases of a `oneOf`, some of which may overlap")
    found = []
    for i, case in enumerate(cases):
        flat = proofs.flat(case, beside)
        others = [j for j in range(len(cases)) if (min(i, j), max(i, j)) in overlapping]
        denied = (_denied(cases[j], flat, negation, f"{place}/{j}") for j in others)
        found.append(all_of([case, *denied]))
    return found


def _denied(case: Schema, beside: Flat, negation: Negation, place: str) -> Schema:
    try:
        return negation.negated(case, beside, place)
    except Unenforceable as error:
        raise Unenforceable(place, f"this case of a `oneOf` may overlap with another, and {error.why}") from error


def _overlapping_cases(cases: Sequence[Schema], beside: Mapping[str, Any], proofs: Proofs) -> set[tuple[int, int]]:
    """Pairs of cases that may both match."""
    return {(j, i) for i in range(len(cases)) for j in range(i) if not proofs.is_impossible(cases[i], cases[j], beside)}


def _differ_in_a_member(cases: Sequence[Schema], beside: Mapping[str, Any], proofs: Proofs) -> bool:
    """Whether all cases are objects that list other values for the same required member: its kind, mostly."""
    flats = [proofs.flat(case, beside) for case in cases]
    required = [frozenset(name for part in flat.parts for name in names(part)) for flat in flats]
    if any(flat.types() != {"object"} for flat in flats):
        return False
    candidates = sorted(frozenset.intersection(*required))[:MAX_MEMBERS]
    return any(_tells_apart(name, flats) for name in candidates)


def _tells_apart(name: str, flats: Sequence[Flat]) -> bool:
    seen: set[str] = set()
    for flat in flats:
        values = next((values for child in flat.members(name) if (values := listed(child)) is not None), None)
        if values is None or not seen.isdisjoint(own := set(map(key_of, values))):
            return False
        seen |= own
    return True


def _beside_one_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """All that a schema says beside its `oneOf`."""
    return {key: value for key, value in schema.items() if key != "oneOf"}


def _property_counts(schema: Mapping[str, Any], key: str, place: str) -> list[Schema]:
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


def _property_names(document: Document, schema: Mapping[str, Any], place: str) -> Schema:
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


def _evaluated_properties(schema: Mapping[str, Any], place: str) -> Schema:
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


def _containing(schema: Mapping[str, Any], place: str) -> list[Schema]:
    """Schemas that together say what `contains` and its bounds do. Raises Unenforceable."""
    wanted, least, most = schema["contains"], number(schema, "minContains"), number(schema, "maxContains")
    least = 1 if least is None else int(least)
    if wanted is True or wanted == {}:
        return [{"minItems": least}, *([] if most is None else [{"maxItems": int(most)}])]
    if most is not None:
        raise Unenforceable(place, "`maxContains` cannot be enforced")
    if least == 0:
        return []
    longest = number(schema, "maxItems")
    if least > 1 or longest is None or longest > MAX_PLACES:
        what = "`contains`" if least == 1 else f"`minContains` {least}"
        raise Unenforceable(place, f"{what} can be enforced for one of at most {MAX_PLACES} items (`maxItems`)")
    ways = [{"prefixItems": [*[True] * i, wanted], "minItems": i + 1} for i in range(int(longest))]
    return [any_of([NO_ARRAY, *({"type": "array", **way} for way in ways)])]


def _unique_items(schema: Mapping[str, Any], proofs: Proofs, place: str) -> Schema:
    """A schema that says what `uniqueItems` does. Raises Unenforceable."""
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
        why = f"`uniqueItems` can be enforced for items of at most {MAX_UNIQUE} listed values, and for at most one item"
        raise Unenforceable(place, why)
    sizes = range(min(len(values), int(len(values) if longest is None else longest)) + 1)
    return any_of([NO_ARRAY, {"enum": [list(order) for size in sizes for order in permutations(values, size)]}])


def _item_values(items: Schema) -> list[Any] | None:
    """All values that items may have, each once; None if they are not listed."""
    found = listed(items)
    if found is None and isinstance(items, Mapping):
        by_type: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
        found = by_type.get(str(items.get("type")))
    return None if found is None else list({key_of(value): value for value in found}.values())


def _without_loops(document: Document) -> Document:
    """The same schema, in which no reference beside other keywords leads back to itself. Raises Unenforceable.

        node: {"$ref": "#/$defs/tree", "required": ["kind"]}     tree: {..., "properties": {"child": node}}

    llguidance does not follow such a reference. It becomes a definition, with what it refers to written out once; from
    then on the definition only refers to itself:

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
        definitions = {name: self._alone(schema) for name, schema in self._document.definitions.items()}
        root = self._alone(self._document.root)
        while self._sites:
            name, schema = self._sites.pop()
            definitions[name] = self._parts(schema, beside=True)
        return Document(root, definitions)

    def _alone(self, schema: Schema) -> Schema:
        """A schema that stands where nothing else describes the same value."""
        if not isinstance(schema, Mapping):
            return schema
        if not (_is_joint(schema) and self._leads_back(schema)):
            return self._parts(schema, beside=False)
        if id(schema) not in self._names:
            self._names[id(schema)] = schema, f"site{len(self._names)}"
            self._sites.append((self._names[id(schema)][1], schema))
        return {"$ref": REFERENCE + self._names[id(schema)][1]}

    def _parts(self, schema: Mapping[str, Any], *, beside: bool) -> Schema:
        """The schema with its parts unrolled; `beside` others that describe the same value."""
        self._left -= 1
        if self._left < 0:
            raise Unenforceable("#", f"references beside other keywords have more than {MAX_UNROLLED:,} parts")
        joint = beside or _is_joint(schema)
        found: dict[str, Any] = {}
        more: list[Schema] = []
        for key, value in schema.items():
            if key == "$ref" and joint and self._is_new(value):
                more.append(self._target(value))
            elif key in MAPS:
                found[key] = {name: self._alone(child) for name, child in value.items()}
            elif key in IN_PLACE:
                found[key] = [self._joined(child) if joint else self._alone(child) for child in value]
            elif key in LISTS:
                found[key] = [self._alone(child) for child in value]
            elif key in SINGLES:
                found[key] = self._alone(value)
            else:
                found[key] = value
        return {**found, "allOf": [*found.get("allOf", ()), *more]} if more else found

    def _joined(self, schema: Schema) -> Schema:
        return self._parts(schema, beside=True) if isinstance(schema, Mapping) else schema

    def _is_new(self, reference: str) -> bool:
        name = reference.removeprefix(REFERENCE)
        return name in self._cyclic and name not in self._inlined

    def _target(self, reference: str) -> Schema:
        self._inlined.append(reference.removeprefix(REFERENCE))
        found = self._joined(self._document.target(reference))
        self._inlined.pop()
        return found

    def _leads_back(self, schema: Schema) -> bool:
        """Whether a schema refers, for its own value, to a definition that leads back to itself."""
        left = [schema]
        while left:
            here = left.pop()
            if isinstance(here, Mapping):
                if "$ref" in here and here["$ref"].removeprefix(REFERENCE) in self._cyclic:
                    return True
                left += [child for key in IN_PLACE for child in here.get(key, ())]
        return False


def _is_joint(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas describe a value of this schema."""
    return len(schema) > 1 or len(schema.get("allOf", ())) > 1


def _cyclic(document: Document) -> frozenset[str]:
    """The definitions that lead back to themselves."""
    leads = {name: _references(schema) for name, schema in document.definitions.items()}
    return frozenset(name for name in leads if name in _reached(leads, name))


def _reached(leads: Mapping[str, set[str]], name: str) -> set[str]:
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
