"""Patterns of the text around a call's name and arguments, matched while the text arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

BLANK = frozenset(" \t\r\n")
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
MAX_NAME_CHARS, MAX_BLANKS = 64, 64
"""Of a function's name, as OpenAI has it, and of white space: a longer run is text, not a call."""
MAX_REST_CHARS = 4096
"""Maximum length of an object after its call's arguments. It is parsed again for each piece; a longer rest is text."""
BLANKS = r"[ \t\r\n]{0,8}"
"""White space that a grammar of calls allows where the form has some: no room to fill an answer with."""


class Missing(Enum):
    """Why a pattern is not found: the text may yet become one, or can never be one."""

    MORE = "more"
    NEVER = "never"


class Found(NamedTuple):
    """The pattern is the first `end` characters; `name` is the first name in it."""

    end: int
    name: str = ""


Part = Callable[[str, int], int | Missing]
"""Reads from a place in a text on: where it ends."""


class Pattern:
    """Parts of text, one behind the other: literal texts, `space`, `function_name`, `rest_of_object` and `peek`."""

    def __init__(self, *parts: str | Part) -> None:
        self._parts = [literal(part) if isinstance(part, str) else part for part in parts]

    def read(self, text: str) -> Found | Missing:
        """Looks for the pattern at the beginning of `text`."""
        place, found = 0, ""
        for part in self._parts:
            end = part(text, place)
            if isinstance(end, Missing):
                return end
            if part is function_name and not found:
                found = text[place:end]
            place = end
        return Found(place, found)


def read_first(patterns: Iterable[Pattern], text: str) -> tuple[int, Found] | Missing:
    """The first pattern found at the beginning of `text`, by its number; MORE while any may yet come."""
    missing = Missing.NEVER
    for number, pattern in enumerate(patterns):
        found = pattern.read(text)
        if isinstance(found, Found):
            return number, found
        missing = Missing.MORE if found is Missing.MORE else missing
    return missing


def literal(wanted: str) -> Part:
    """Exactly this text."""

    def read(text: str, place: int) -> int | Missing:
        if text.startswith(wanted, place):
            return place + len(wanted)
        return Missing.MORE if wanted.startswith(text[place:]) else Missing.NEVER

    return read


def one_of(*wanted: str) -> Part:
    """One of some texts, none of which begins with another."""
    parts = [literal(text) for text in wanted]

    def read(text: str, place: int) -> int | Missing:
        ends = [part(text, place) for part in parts]
        found = [end for end in ends if not isinstance(end, Missing)]
        if found:
            return found[0]
        return Missing.MORE if Missing.MORE in ends else Missing.NEVER

    return read


def peek(wanted: str) -> Part:
    """Exactly this text, which belongs to what follows."""
    part = literal(wanted)

    def read(text: str, place: int) -> int | Missing:
        end = part(text, place)
        return end if isinstance(end, Missing) else place

    return read


def peek_one_of(*wanted: str) -> Part:
    """One of some texts, as `one_of`, which belongs to what follows."""
    part = one_of(*wanted)

    def read(text: str, place: int) -> int | Missing:
        end = part(text, place)
        return end if isinstance(end, Missing) else place

    return read


def space(text: str, place: int) -> int | Missing:
    """A little white space, or none; something must follow."""
    end = place
    while end < len(text) and text[end] in BLANK:
        end += 1
    if end - place > MAX_BLANKS:
        return Missing.NEVER
    return end if end < len(text) else Missing.MORE


def function_name(text: str, place: int) -> int | Missing:
    """The name of a function; something else must follow."""
    end = place
    while end < len(text) and text[end] in NAME_CHARS:
        end += 1
    if end - place > MAX_NAME_CHARS or (end == place and end < len(text)):
        return Missing.NEVER
    return end if end < len(text) else Missing.MORE


def rest_of_object(text: str, place: int) -> int | Missing:
    """The rest of a JSON object behind one of its values, with its closing brace."""
    start = space(text, place)
    if isinstance(start, Missing) or text[start] not in ",}":
        return start if isinstance(start, Missing) else Missing.NEVER
    extent = Extent(depth=1)
    end = place + extent.measure(text[place : place + MAX_REST_CHARS])
    if extent.complete:
        return end
    return Missing.NEVER if end - place == MAX_REST_CHARS else Missing.MORE


class Extent:
    """Where a JSON object ends, as its text arrives. `depth` brackets of it are open at the beginning."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False
        self.complete = False

    def measure(self, text: str) -> int:
        """How many of these characters belong to the object."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return i + 1
        return len(text)


OBJECT_HEAD: tuple[str | Part, ...] = (
    *("{", space, '"name"', space, ":", space, '"', function_name, '"', space, ",", space),
    *(one_of('"arguments"', '"parameters"'), space, ":", space, peek("{")),
)
"""A call as a JSON object, to the beginning of its arguments."""
