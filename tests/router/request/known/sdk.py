"""Walks the request types of the official SDKs: fields, variants of unions, values of enumerations."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from typing_extensions import get_type_hints, is_typeddict

DISCRIMINATORS = ("type", "role")


def paths(root: Any, is_served: Callable[[str], bool], path: str = "") -> Iterator[str]:
    """The possible contents of `root`: `a.b` for a field, `a[kind]` for a variant of it, `a=value` for a value.

    Paths inside of a path are asked for only where `is_served`.
    """
    members = [*_members(root)]
    if any(get_origin(member) is dict for member in members):
        return  # a schema, or another free object
    variants = [member for member in members if is_typeddict(member)]
    for variant in variants:
        for kind in _kinds(variant) if path and len(variants) > 1 else [""]:
            place = f"{path}[{kind}]" if kind else path
            if kind:
                yield place
            if not place or is_served(place):
                yield from _fields(variant, is_served, place)
    if str in members:
        return  # an open set of values
    for value in (value for member in members if get_origin(member) is Literal for value in get_args(member)):
        yield f"{path}={str(value).lower()}"


def _fields(variant: Any, is_served: Callable[[str], bool], place: str) -> Iterator[str]:
    for name, hint in get_type_hints(variant).items():
        if name in DISCRIMINATORS and _values(hint):
            continue
        field = f"{place}.{name}" if place else name
        yield field
        if is_served(field):
            yield from paths(hint, is_served, field)


def _members(hint: Any) -> Iterator[Any]:
    """The types that a hint allows; the items of a list count as the list."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _members(member)
    elif origin is Annotated:
        yield from _members(get_args(hint)[0])
    elif origin not in (None, Literal, dict):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _kinds(variant: Any) -> list[str]:
    """The name of a variant: its type, its role, or the names of its fields."""
    hints = get_type_hints(variant)
    for name in DISCRIMINATORS:
        if values := _values(hints.get(name)):
            return values
    return ["+".join(hints)]


def _values(hint: Any) -> list[str]:
    return [str(value) for member in _members(hint) if get_origin(member) is Literal for value in get_args(member)]
