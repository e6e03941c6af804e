"""Schemas that refer to themselves beside other keywords, which llguidance does not follow.

    node: {"$ref": "#/$defs/tree", "required": ["kind"]}     tree: {..., "properties": {"child": node}}

becomes a definition of its own, with what it refers to written out once; from then on it only refers to itself:

    site: {"allOf": [{..., "properties": {"child": {"$ref": site}}}, {"required": ["kind"]}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.text.schema.canonical_form import REFERENCE, Document
from router.text.schema.keywords import LISTS, MAPS, SINGLES, Schema, Unenforceable, children

MAX_UNROLLED = 20_000
"""That writing out may make of one document."""
IN_PLACE = ("allOf", "anyOf")


def without_loops(document: Document) -> Document:
    """The same schema, in which no reference beside other keywords leads back to itself. Raises Unenforceable."""
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
