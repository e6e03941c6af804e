"""Finds the schema that a reference names: by pointer, by anchor, or by the identifier of a part of the document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from router.text.schema.keywords import Schema, Unenforceable, children

ROOT = "urn:schema"
"""The base of a document without an identifier."""


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
