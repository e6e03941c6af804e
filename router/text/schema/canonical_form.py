"""Conversion of a schema of any draft to draft 2020-12, with all referenced schemas under `$defs`.

    {"definitions": {"a": ...}, "$ref": "#/definitions/a"}  ->  {"$ref": "#/$defs/0", "$defs": {"0": ...}}

Annotations such as descriptions and examples, and unused definitions, are removed. This keeps large schemas within the
grammar size limit.
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
    check,
    children,
    draft_of,
    escaped,
    mapping,
    names,
)
from router.text.schema.patterns import portable, texts_of

MAX_DEPTH = 64
"""Maximum nesting depth. llguidance's limit is 128 objects and lists; a member takes two."""
MAX_SCHEMAS = 50_000
"""Maximum number of schemas in a document, before and after rewriting. The same limit as in llguidance."""
REFERENCE = "#/$defs/"
ROOT = "urn:schema"
"""Base URI of a document without an identifier."""


@dataclass(frozen=True, slots=True)
class Document:
    """A canonical schema: its root, its definitions, and the original JSON pointer of each definition."""

    root: Schema
    definitions: dict[str, Schema] = field(default_factory=dict)
    pointers: dict[str, str] = field(default_factory=dict)

    def target(self, reference: str) -> Schema:
        return self.definitions[reference.removeprefix(REFERENCE)]

    def whole(self) -> Schema:
        """Return the root schema with its definitions under `$defs`."""
        if not self.definitions or not isinstance(self.root, Mapping):
            return self.root
        return {**self.root, "$defs": self.definitions}


def canonical(schema: Mapping[str, Any]) -> Document:
    """Convert a schema to canonical form. Raises Unenforceable for unresolved references and excessive schemas."""
    draft = draft_of(schema)
    writer = _Writer(Resources(schema, draft), draft)
    root = writer.written(writer.resources.root, 0)
    definitions: dict[str, Schema] = {}
    while writer.left:
        name, location = writer.left.pop()
        definitions[name] = writer.written(location, 0)
    return Document(root, definitions, writer.pointers)


class _Writer:
    def __init__(self, resources: Resources, draft: int) -> None:
        self.resources, self._draft = resources, draft
        self.left: list[tuple[str, Location]] = []
        self.pointers: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._num_schemas = 0

    def written(self, location: Location, depth: int) -> Schema:
        schema = location.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise Unenforceable(location.pointer, "a schema must be an object, true or false")
        self._num_schemas += 1
        if depth > MAX_DEPTH:
            raise Unenforceable(location.pointer, f"the schema is nested deeper than {MAX_DEPTH} levels")
        if self._num_schemas > MAX_SCHEMAS:
            raise Unenforceable(location.pointer, f"the schema is too large: more than {MAX_SCHEMAS:,} parts")
        if self._draft <= 7 and "$ref" in schema:  # these drafts ignore the siblings of `$ref`
            return {"$ref": self._reference(self.resources.target(schema["$ref"], location))}
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if SINCE.get(key, 4) <= self._draft:
                self._write(key, value, location, depth + 1, found)
            elif key == "const":
                found[EXTRA] = [*found.get(EXTRA, ()), {"const": value}]
        return _without_used_patterns(found)

    def _write(self, key: str, value: Any, location: Location, depth: int, found: dict[str, Any]) -> None:
        """Add the canonical form of one keyword to `found`."""
        schema: Mapping[str, Any] = location.schema
        if key in ("$ref", "$dynamicRef", "$recursiveRef"):
            self._write_reference(key, value, location, found)
        elif key == "dependencies" and isinstance(value, Mapping):
            wanted = self._dependencies(value, location, depth)
            if self._draft <= 7:
                found.update(wanted)
            else:
                found[EXTRA] = [*found.get(EXTRA, ()), wanted]
        elif key in ("$defs", "definitions"):
            pass  # referenced definitions are written last, once each
        elif key in MAPS and isinstance(value, Mapping):
            children = {n: self._child(location, f"/{key}/{escaped(n)}", each, depth) for n, each in value.items()}
            found[key] = _portable_names(children) if key == "patternProperties" else children
        elif key == "pattern" and isinstance(value, str):
            found[key] = portable(value)
        elif key == "items" and isinstance(value, list):
            found["prefixItems"] = self._children(location, key, value, depth)
        elif key in LISTS and isinstance(value, list):
            found[key] = [*found.get(key, ()), *self._children(location, key, value, depth)]
        elif key == "additionalItems":
            if isinstance(schema.get("items"), list):
                found["items"] = self._child(location, f"/{key}", value, depth)
        elif key in SINGLES:
            found[key] = self._child(location, f"/{key}", value, depth)
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            if value and (bound := key.replace("exclusiveM", "m")) in schema:
                found[key] = schema[bound]
        elif key in (*MAPS, *LISTS):
            kind = "an array" if key in LISTS else "an object"
            raise Unenforceable(f"{location.pointer}/{key}", f"must be {kind}")
        elif key in PLAIN:
            check(key, value, f"{location.pointer}/{key}")
            if key != "format" or value in FORMATS:
                found[key] = value

    def _write_reference(self, key: str, value: Any, location: Location, found: dict[str, Any]) -> None:
        if key == "$recursiveRef" and self.resources.is_recursive_anchored:
            raise Unenforceable(location.pointer, "$recursiveRef with $recursiveAnchor is not supported")
        find = self.resources.dynamic_target if key == "$dynamicRef" else self.resources.target
        reference = self._reference(find(value, location))
        if "$ref" in found:
            found.setdefault("allOf", []).append({"$ref": reference})
        else:
            found["$ref"] = reference

    def _dependencies(self, value: Mapping[str, Any], location: Location, depth: int) -> Schema:
        """Split `dependencies` (drafts 4 to 7) into the two keywords of newer drafts."""
        names, schemas = {}, {}
        for name, needed in value.items():
            if isinstance(needed, list | str):  # draft 3 allows a single name
                names[name] = [needed] if isinstance(needed, str) else needed
                check("required", names[name], f"{location.pointer}/dependencies/{escaped(name)}")
            else:
                schemas[name] = self._child(location, f"/dependencies/{escaped(name)}", needed, depth)
        return {"dependentRequired": names, "dependentSchemas": schemas}

    def _children(self, location: Location, key: str, values: list[Any], depth: int) -> list[Schema]:
        return [self._child(location, f"/{key}/{i}", value, depth) for i, value in enumerate(values)]

    def _child(self, location: Location, step: str, value: Any, depth: int) -> Schema:
        return self.written(self.resources.entered(Location(value, location.base, location.pointer + step)), depth)

    def _reference(self, target: Location) -> str:
        name = self._names.get(target.pointer)
        if name is None:
            name = self._names[target.pointer] = str(len(self._names))
            self.pointers[name] = target.pointer
            self.left.append((name, target))
        return REFERENCE + name


def _without_used_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove patterns whose possible names are all listed in `properties`.

    llguidance would allow a comma before a further member of such a pattern, where no member can follow.
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
    """Translate patterns, merging the schemas of equivalent patterns such as `[a-]` and `[a\\-]`."""
    found: dict[str, Schema] = {}
    for name, child in children.items():
        written = portable(name)
        found[written] = {"allOf": [found[written], child]} if written in found else child
    return found


@dataclass(frozen=True, slots=True)
class Location:
    """A schema, the base URI of its references, and its JSON pointer from the document root."""

    schema: Schema
    base: str
    pointer: str


class Resources:
    """Identifiers and anchors of one document."""

    def __init__(self, document: Mapping[str, Any], draft: int) -> None:
        self._draft = draft
        self._resources: dict[str, Location] = {}
        self._anchors: dict[tuple[str, str], Location] = {}
        self._dynamic: dict[str, list[Location]] = {}
        self.is_recursive_anchored = False
        self.root = self._enter(Location(document, ROOT, "#"))
        self._resources.setdefault(ROOT, self.root)
        self._index(self.root)

    def entered(self, location: Location) -> Location:
        """Return the location with its base URI updated by the schema's own identifier."""
        found = self._identifier(location.schema)
        return (
            location
            if found is None
            else Location(location.schema, urldefrag(urljoin(location.base, found))[0], location.pointer)
        )

    def target(self, reference: object, location: Location) -> Location:
        """Resolve a `$ref`. Raises Unenforceable."""
        if not isinstance(reference, str):
            raise Unenforceable(location.pointer, "$ref must be a string")
        uri, fragment = urldefrag(reference)
        base = urldefrag(urljoin(location.base, uri))[0] if uri else location.base
        resource = self._resources.get(base)
        if resource is None:
            raise Unenforceable(
                location.pointer, f"$ref {reference[:200]!r} is not in this schema; other documents are not fetched"
            )
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return self._pointed(resource, fragment, reference, location)
        if (found := self._anchors.get((base, fragment))) is None:
            raise _missing(reference, location)
        return found

    def dynamic_target(self, reference: object, location: Location) -> Location:
        """Resolve a `$dynamicRef` that has only one possible target. Raises Unenforceable."""
        name = reference[1:] if isinstance(reference, str) and reference.startswith("#") else ""
        if len(self._dynamic.get(name, ())) == 1:
            return self._dynamic[name][0]
        if name in self._dynamic:
            raise Unenforceable(location.pointer, f"$dynamicRef {reference!r} has several targets")
        return self.target(reference, location)

    def _index(self, location: Location) -> None:
        left = [location]
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
                left.append(self._enter(Location(child, here.base, here.pointer + step)))

    def _enter(self, location: Location) -> Location:
        found = self._identifier(location.schema)
        if found is None:
            name = self._name(location.schema)
            if name.startswith("#") and len(name) > 1:  # an anchor in drafts up to 7
                self._anchors.setdefault((location.base, name[1:]), location)
            return location
        entered = self.entered(location)
        self._resources.setdefault(entered.base, entered)
        return entered

    def _identifier(self, schema: Schema) -> str | None:
        """Return the identifier that makes a schema a resource, or None."""
        if isinstance(schema, Mapping) and "$ref" in schema and self._draft < 2019:
            return None
        name = self._name(schema)
        return name if name and not name.startswith("#") else None

    def _name(self, schema: Schema) -> str:
        name = schema.get("id" if self._draft == 4 else "$id") if isinstance(schema, Mapping) else None
        return name if isinstance(name, str) else ""

    def _pointed(self, resource: Location, fragment: str, reference: str, location: Location) -> Location:
        found = resource
        for step in fragment.split("/")[1:]:
            key, value = step.replace("~1", "/").replace("~0", "~"), found.schema
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                child = value[int(key)]
            elif isinstance(value, Mapping) and key in value:
                child = value[key]
            else:
                raise _missing(reference, location)
            found = self.entered(Location(child, found.base, f"{found.pointer}/{step}"))
        return found


def _missing(reference: str, location: Location) -> Unenforceable:
    return Unenforceable(location.pointer, f"$ref {reference[:200]!r} does not exist")
