"""Writes a schema of any draft in the words of draft 2020-12, with all referred schemas under `$defs`, unannotated.

    {"definitions": {"a": ...}, "$ref": "#/definitions/a"}  ->  {"$ref": "#/$defs/0", "$defs": {"0": ...}}

Descriptions, examples and unused definitions are left out: large schemas stay below the bound of grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from router.text.schema.keywords import (
    EXTRA,
    FORMATS,
    LISTS,
    MAPS,
    PLAIN,
    SINCE,
    SINGLES,
    Schema,
    Unenforceable,
    children,
    draft_of,
    escaped,
    mapping,
    names,
)
from router.text.schema.patterns import portable, texts_of

MAX_DEPTH = 64
"""Of nested schemas. llguidance's own bound of recursion is 128 objects and lists, two of which make a member."""
MAX_SCHEMAS = 50_000
"""In one document, before and after it is rewritten: as in llguidance."""
REFERENCE = "#/$defs/"
ROOT = "urn:schema"
"""The base of a document without an identifier."""


@dataclass(frozen=True, slots=True)
class Document:
    """A canonical schema: its root, its definitions, and where each of them stood."""

    root: Schema
    definitions: dict[str, Schema] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def target(self, reference: str) -> Schema:
        return self.definitions[reference.removeprefix(REFERENCE)]

    def whole(self) -> Schema:
        """The schema with its definitions."""
        if not self.definitions or not isinstance(self.root, Mapping):
            return self.root
        return {**self.root, "$defs": self.definitions}


def canonical(schema: Mapping[str, Any]) -> Document:
    """The schema in canonical form. Raises Unenforceable for a reference that names nothing, and beyond the bounds."""
    draft = draft_of(schema)
    writer = _Writer(Resources(schema, draft), draft)
    root = writer.written(writer.resources.root, 0)
    definitions: dict[str, Schema] = {}
    while writer.left:
        name, place = writer.left.pop()
        definitions[name] = writer.written(place, 0)
    return Document(root, definitions, writer.places)


class _Writer:
    def __init__(self, resources: Resources, draft: int) -> None:
        self.resources, self._draft = resources, draft
        self.left: list[tuple[str, Place]] = []
        self.places: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._num_schemas = 0

    def written(self, place: Place, depth: int) -> Schema:
        schema = place.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise Unenforceable(place.pointer, "a schema must be an object, true or false")
        self._num_schemas += 1
        if depth > MAX_DEPTH:
            raise Unenforceable(place.pointer, f"nested deeper than {MAX_DEPTH} levels, the bound of recursion")
        if self._num_schemas > MAX_SCHEMAS:
            raise Unenforceable(place.pointer, f"the schema is too large: more than {MAX_SCHEMAS:,} parts")
        if self._draft <= 7 and "$ref" in schema:  # beside which older drafts ignore everything
            return {"$ref": self._reference(self.resources.target(schema["$ref"], place))}
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if SINCE.get(key, 4) <= self._draft:
                self._write(key, value, place, depth + 1, found)
            elif key == "const":
                found[EXTRA] = [*found.get(EXTRA, ()), {"const": value}]
        return _without_used_patterns(found)

    def _write(self, key: str, value: Any, place: Place, depth: int, found: dict[str, Any]) -> None:
        """Adds a keyword to those that are `found`."""
        schema: Mapping[str, Any] = place.schema
        if key in ("$ref", "$dynamicRef", "$recursiveRef"):
            self._write_reference(key, value, place, found)
        elif key == "dependencies" and isinstance(value, Mapping):
            wanted = self._dependencies(value, place, depth)
            if self._draft <= 7:
                found.update(wanted)
            else:
                found[EXTRA] = [*found.get(EXTRA, ()), wanted]
        elif key in ("$defs", "definitions"):
            pass  # what is referred to is written once, at the end
        elif key in MAPS and isinstance(value, Mapping):
            children = {n: self._child(place, f"/{key}/{escaped(n)}", each, depth) for n, each in value.items()}
            found[key] = _portable_names(children) if key == "patternProperties" else children
        elif key == "pattern" and isinstance(value, str):
            found[key] = portable(value)
        elif key == "items" and isinstance(value, list):
            found["prefixItems"] = self._children(place, key, value, depth)
        elif key in LISTS and isinstance(value, list):
            found[key] = [*found.get(key, ()), *self._children(place, key, value, depth)]
        elif key == "additionalItems":
            if isinstance(schema.get("items"), list):
                found["items"] = self._child(place, f"/{key}", value, depth)
        elif key in SINGLES:
            found[key] = self._child(place, f"/{key}", value, depth)
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            if value and (bound := key.replace("exclusiveM", "m")) in schema:
                found[key] = schema[bound]
        elif key in (*MAPS, *LISTS):
            kind = "an array" if key in LISTS else "an object"
            raise Unenforceable(f"{place.pointer}/{key}", f"must be {kind}")
        elif key in PLAIN and not (key == "format" and isinstance(value, str) and value not in FORMATS):
            found[key] = value

    def _write_reference(self, key: str, value: Any, place: Place, found: dict[str, Any]) -> None:
        if key == "$recursiveRef" and self.resources.is_recursive_anchored:
            raise Unenforceable(place.pointer, "$recursiveRef with $recursiveAnchor cannot be followed")
        find = self.resources.dynamic_target if key == "$dynamicRef" else self.resources.target
        reference = self._reference(find(value, place))
        if "$ref" in found:
            found.setdefault("allOf", []).append({"$ref": reference})
        else:
            found["$ref"] = reference

    def _dependencies(self, value: Mapping[str, Any], place: Place, depth: int) -> Schema:
        """A keyword of drafts 4 to 7, as the two that newer drafts have for it."""
        names, schemas = {}, {}
        for name, needed in value.items():
            if isinstance(needed, list | str):  # a single name, in draft 3
                names[name] = [needed] if isinstance(needed, str) else needed
            else:
                schemas[name] = self._child(place, f"/dependencies/{escaped(name)}", needed, depth)
        return {"dependentRequired": names, "dependentSchemas": schemas}

    def _children(self, place: Place, key: str, values: list[Any], depth: int) -> list[Schema]:
        return [self._child(place, f"/{key}/{i}", value, depth) for i, value in enumerate(values)]

    def _child(self, place: Place, step: str, value: Any, depth: int) -> Schema:
        return self.written(self.resources.entered(Place(value, place.base, place.pointer + step)), depth)

    def _reference(self, target: Place) -> str:
        name = self._names.get(target.pointer)
        if name is None:
            name = self._names[target.pointer] = str(len(self._names))
            self.places[name] = target.pointer
            self.left.append((name, target))
        return REFERENCE + name


def _without_used_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove patterns all of whose names are listed in `properties`.

    The library would allow a comma before a further member of such a pattern, after which no member is possible.
    """
    patterns = mapping(schema, "patternProperties")
    known = {**dict.fromkeys(names(schema)), **mapping(schema, "properties")}
    used: dict[str, list[str]] = {}
    for pattern in patterns:
        texts, is_whole = texts_of(pattern) or ([], False)
        if is_whole and all(text in known for text in texts):
            used[pattern] = texts
    if not used:
        return schema
    properties = dict(mapping(schema, "properties"))
    for pattern, texts in used.items():
        for text in texts:
            child = patterns[pattern]
            properties[text] = {"allOf": [properties[text], child]} if text in properties else child
    left = {pattern: child for pattern, child in patterns.items() if pattern not in used}
    found = {**schema, "properties": properties, "patternProperties": left}
    return found if left else {key: value for key, value in found.items() if key != "patternProperties"}


def _portable_names(children: Mapping[str, Schema]) -> dict[str, Schema]:
    """Schemas by patterns. Two ways to write one pattern, such as `[a-]` and `[a\\-]`, become one with both schemas."""
    found: dict[str, Schema] = {}
    for name, child in children.items():
        written = portable(name)
        found[written] = {"allOf": [found[written], child]} if written in found else child
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """A schema, the base that its references are relative to, and its pointer from the document's root."""

    schema: Schema
    base: str
    pointer: str


class Resources:
    """The identifiers and anchors of one document."""

    def __init__(self, document: Mapping[str, Any], draft: int) -> None:
        self._draft = draft
        self._resources: dict[str, Place] = {}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._dynamic: dict[str, list[Place]] = {}
        self.is_recursive_anchored = False
        self.root = self._enter(Place(document, ROOT, "#"))
        self._resources.setdefault(ROOT, self.root)
        self._index(self.root)

    def entered(self, place: Place) -> Place:
        """The same place with the base that its own identifier gives it."""
        found = self._identifier(place.schema)
        return place if found is None else Place(place.schema, urldefrag(urljoin(place.base, found))[0], place.pointer)

    def target(self, reference: object, place: Place) -> Place:
        """The schema that a `$ref` at a place names. Raises Unenforceable."""
        if not isinstance(reference, str):
            raise Unenforceable(place.pointer, "$ref must be a text")
        uri, fragment = urldefrag(reference)
        base = urldefrag(urljoin(place.base, uri))[0] if uri else place.base
        resource = self._resources.get(base)
        if resource is None:
            raise Unenforceable(
                place.pointer, f"$ref {reference[:200]!r} is not in this schema, and this server does not fetch"
            )
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return self._pointed(resource, fragment, reference, place)
        if (found := self._anchors.get((base, fragment))) is None:
            raise _missing(reference, place)
        return found

    def dynamic_target(self, reference: object, place: Place) -> Place:
        """The schema that a `$dynamicRef` names, where only one can be meant. Raises Unenforceable."""
        name = reference[1:] if isinstance(reference, str) and reference.startswith("#") else ""
        if len(self._dynamic.get(name, ())) == 1:
            return self._dynamic[name][0]
        if name in self._dynamic:
            raise Unenforceable(place.pointer, f"$dynamicRef {reference!r} has several targets")
        return self.target(reference, place)

    def _index(self, place: Place) -> None:
        left = [place]
        while left:
            here = left.pop()
            if not isinstance(here.schema, Mapping):
                continue
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := here.schema.get(keyword), str):
                    self._anchors.setdefault((here.base, name), here)
            if isinstance(name := here.schema.get("$dynamicAnchor"), str):
                self._dynamic.setdefault(name, []).append(here)
            self.is_recursive_anchored |= here.schema.get("$recursiveAnchor") is True
            for step, child in children(here.schema):
                left.append(self._enter(Place(child, here.base, here.pointer + step)))

    def _enter(self, place: Place) -> Place:
        found = self._identifier(place.schema)
        if found is None:
            name = self._name(place.schema)
            if name.startswith("#") and len(name) > 1:  # an anchor, in older drafts
                self._anchors.setdefault((place.base, name[1:]), place)
            return place
        entered = self.entered(place)
        self._resources.setdefault(entered.base, entered)
        return entered

    def _identifier(self, schema: Schema) -> str | None:
        """The identifier by which a schema begins a resource, or None."""
        if isinstance(schema, Mapping) and "$ref" in schema and self._draft < 2019:
            return None
        name = self._name(schema)
        return name if name and not name.startswith("#") else None

    def _name(self, schema: Schema) -> str:
        name = schema.get("id" if self._draft == 4 else "$id") if isinstance(schema, Mapping) else None
        return name if isinstance(name, str) else ""

    def _pointed(self, resource: Place, fragment: str, reference: str, place: Place) -> Place:
        found = resource
        for step in fragment.split("/")[1:]:
            key, value = step.replace("~1", "/").replace("~0", "~"), found.schema
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                child = value[int(key)]
            elif isinstance(value, Mapping) and key in value:
                child = value[key]
            else:
                raise _missing(reference, place)
            found = self.entered(Place(child, found.base, f"{found.pointer}/{step}"))
        return found


def _missing(reference: str, place: Place) -> Unenforceable:
    return Unenforceable(place.pointer, f"$ref {reference[:200]!r} does not exist")
