"""Reads the arguments of a call in Python's syntax. Nothing is evaluated: literals are all that there may be."""

from __future__ import annotations

import math
import re
from typing import Any

MAX_NESTED_LISTS = 64
"""Of lists within lists, so that no answer exhausts the stack."""
KEYWORD = re.compile(r"\s*([^\s=(),\"'\[\]{}]+)\s*=\s*")
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
EXPONENT = re.compile(r"[eE][+-]?")
WORD = re.compile(r"[A-Za-z]+")
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
ESCAPED = {
    **{"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"},
    **{"\\": "\\", "'": "'", '"': '"', "\n": ""},
}
QUOTES = ('"""', "'''", '"', "'")


class NotLiteralError(Exception):
    """The text is no row of keyword arguments with literals."""


class UnfinishedError(Exception):
    """The text ends inside an argument."""


class PythonExtent:
    """Where the arguments of a call end, as their text arrives: at the parenthesis behind them."""

    def __init__(self, start: int) -> None:
        """`start` is the place in the text behind the opening parenthesis."""
        self._depth, self._quote, self._place = 1, "", start
        self.complete = False

    def measure(self, text: str) -> int:
        """Up to where `text`, all that came so far, belongs to the call, parenthesis included."""
        place = self._place
        while place < len(text):
            step = self._in_string(text, place) if self._quote else self._outside(text, place)
            if not step:
                break
            place += step
            if self.complete:
                break
        self._place = place
        return place

    def _in_string(self, text: str, place: int) -> int:
        if text[place] == "\\":
            return 2 if place + 1 < len(text) else 0
        if text.startswith(self._quote, place):
            length, self._quote = len(self._quote), ""
            return length
        return 0 if self._quote.startswith(text[place:]) else 1

    def _outside(self, text: str, place: int) -> int:
        char = text[place]
        if char in "\"'":
            if len(text) - place < 3 and text[place:] == char * (len(text) - place):
                return 0  # it may become three quotes
            self._quote = char * 3 if text.startswith(char * 3, place) else char
            return len(self._quote)
        if char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            self.complete = not self._depth
        return 1


def read_arguments(text: str) -> tuple[dict[str, Any], bool]:
    """The arguments at the beginning of `text`, and whether the parenthesis behind them is there.

    An argument that no comma or parenthesis follows may go on, so it is left out. Raises NotLiteralError.
    """
    found: dict[str, Any] = {}
    place = _blank(text, 0)
    try:
        while not text.startswith(")", place):
            if text.startswith("**", place):
                given, place = _value(text, place + 2, 0)
                if not isinstance(given, dict) or not found.keys().isdisjoint(given):
                    raise NotLiteralError
                place, more = _separator(text, place, ")")
                found |= given
                if not more:
                    return found, True
                continue
            keyword = KEYWORD.match(text, place)
            if keyword is None:
                if place == len(text) or KEYWORD.match(text + "=", place):
                    raise UnfinishedError
                raise NotLiteralError
            value, place = _value(text, keyword.end(), 0)
            place, more = _separator(text, place, ")")
            if keyword[1] in found:
                raise NotLiteralError
            found[keyword[1]] = value
            if not more:
                return found, True
    except UnfinishedError:
        return found, False
    return found, True


def read_value(text: str) -> Any:
    """Parse `text` as one value. Raises NotLiteralError."""
    try:
        value, place = _value(text, 0, 0)
    except UnfinishedError as error:
        raise NotLiteralError from error
    if _blank(text, place) < len(text):
        raise NotLiteralError
    return value


def _value(text: str, place: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_NESTED_LISTS:
        raise NotLiteralError
    place = _blank(text, place)
    if place == len(text):
        raise UnfinishedError
    char = text[place]
    if char in "\"'":
        return _string(text, place)
    if char in "[(":
        return _list(text, place + 1, "]" if char == "[" else ")", depth + 1)
    if char == "{":
        return _dict(text, place + 1, depth + 1)
    word = WORD.match(text, place)
    if word is not None:
        if word[0] in WORDS:
            return WORDS[word[0]], word.end()
        if word.end() == len(text):
            raise UnfinishedError
        raise NotLiteralError
    return _number(text, place)


def _number(text: str, place: int) -> tuple[int | float, int]:
    found = NUMBER.match(text, place)
    if found is None:
        raise UnfinishedError if text[place:] in ("+", "-", ".", "+.", "-.") else NotLiteralError
    try:
        value = float(found[0]) if set(found[0]) & set(".eE") else int(found[0])
    except ValueError as error:
        raise NotLiteralError from error
    if not math.isfinite(value):
        raise NotLiteralError
    if EXPONENT.fullmatch(text, found.end()):
        raise UnfinishedError
    return value, found.end()


def _string(text: str, place: int) -> tuple[str, int]:
    quote = next(quote for quote in QUOTES if text.startswith(quote, place))
    start = end = place + len(quote)
    while not text.startswith(quote, end):
        if end >= len(text):
            raise UnfinishedError
        end += 2 if text[end] == "\\" else 1
    said = ESCAPE.sub(_unescaped, text[start:end])
    try:  # two escapes may be one character, one alone may be none
        return said.encode("utf-16", "surrogatepass").decode("utf-16"), end + len(quote)
    except UnicodeDecodeError as error:
        raise NotLiteralError from error


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code in ESCAPED:
        return ESCAPED[code]
    if code[0] in "xuU" and len(code) > 1:
        if (number := int(code[1:], 16)) > 0x10FFFF:
            raise NotLiteralError
        return chr(number)
    return chr(int(code, 8)) if code.isdigit() and int(code[0]) < 8 else found[0]


def _list(text: str, place: int, end: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    place = _blank(text, place)
    while not text.startswith(end, place):
        item, place = _value(text, place, depth)
        items.append(item)
        place, more = _separator(text, place, end)
        if not more:
            return items, place
    return items, place + 1


def _dict(text: str, place: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    place = _blank(text, place)
    while not text.startswith("}", place):
        if place < len(text) and text[place] not in "\"'":
            raise NotLiteralError
        key, place = _value(text, place, depth)
        place = _blank(text, place)
        if not text.startswith(":", place):
            raise UnfinishedError if place == len(text) else NotLiteralError
        items[key], place = _value(text, place + 1, depth)
        place, more = _separator(text, place, "}")
        if not more:
            return items, place
    return items, place + 1


def _separator(text: str, place: int, end: str) -> tuple[int, bool]:
    """Behind a value: the place behind its comma or the end, and whether it was a comma."""
    place = _blank(text, place)
    if place == len(text):
        raise UnfinishedError
    if text[place] not in ("," + end):
        raise NotLiteralError
    more = text[place] == ","
    return (_blank(text, place + 1) if more else place + 1), more


def _blank(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
