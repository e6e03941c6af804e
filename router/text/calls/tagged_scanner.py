"""Finds calls whose arguments are plain text between tags, and gives them out as JSON while they arrive."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.text.calls.function import Function
from router.text.calls.pattern import Found, Missing
from router.text.calls.scanner import Layout, MarkedScanner
from router.text.calls.tagged_value import ValueReader, as_json, reader_of, written
from router.text.marks import overlap
from router.text.part import CallPart, Part
from router.text.schema import Unenforceable

MAX_KEY_CHARS = 256
"""Of an argument's name: a longer one is text, not a call."""


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The tags of an argument: `open` KEY `key_end`, white space, `value` VALUE `close`.

    `lined`: a line break after the last opening tag and one before the closing one do not belong to the value.
    `python`: lists and dictionaries are in Python's syntax.
    """

    open: str
    key_end: str
    value: str
    close: str
    lined: bool = False
    python: bool = False


class _ValueEnd:
    """Finds the closing tag of a value while its text arrives. With `quoted`, tags in quotes are ignored."""

    def __init__(self, close: str, *, quoted: bool) -> None:
        self._close, self._quoted = close, quoted
        self._piece = re.compile(rf"\\[\s\S]?|[\"']|{re.escape(close)}")
        self._place, self._quote = 0, ""

    def find(self, text: str) -> int:
        """Return the position of the tag in `text`, the whole value so far, or -1."""
        if not self._quoted:
            found = text.find(self._close, self._place)
            self._place = max(self._place, len(text) - len(self._close) + 1)
            return found
        for piece in self._piece.finditer(text, self._place):
            mark = piece[0]
            if mark == "\\":  # may escape the next character
                return -1
            self._place = piece.end()
            if not self._quote and mark == self._close:
                return piece.start()
            if mark in ("'", '"') and self._quote in ("", mark):
                self._quote = "" if self._quote else mark
        self._place = max(self._place, len(text) - len(self._close) + 1)
        return -1


class TaggedScanner(MarkedScanner):
    """A text arrives in the call as it is made; an argument of another type once it is complete."""

    def __init__(
        self,
        openings: Sequence[str],
        layouts: Sequence[Layout],
        tags: ArgumentTags,
        functions: Mapping[str, Function],
        *,
        start: int = 0,
        only_calls: bool = False,
    ) -> None:
        self._tags, self._functions = tags, functions
        self._function: Function | None = None
        self._known_keys: list[str] = []  # the longest first
        self._keys: set[str] = set()
        self._reader: ValueReader | None = None
        self._end_of_value = _ValueEnd(tags.close, quoted=False)
        self._is_again = self._is_begun = False
        """State of the current argument: whether its name occurred before, and whether its text has begun."""
        super().__init__(openings, layouts, start=start, only_calls=only_calls)

    @property
    def calls_are_whole(self) -> bool:
        return self._step not in (self._arguments, self._value)

    def _call(self, found: Found, parts: list[Part]) -> bool:
        self._function, self._keys = self._functions.get(found.name), set()
        self._known_keys = self._names_of_arguments()
        return super()._call(found, parts)

    def _arguments(self, parts: list[Part]) -> bool:
        """Between arguments: another one, or the end of the call."""
        tags, held = self._tags, self._held.lstrip()
        if held.startswith(tags.open):
            return self._key(held, parts)
        if tags.open.startswith(held) or self._layout.tail.read(self._held) is Missing.MORE:
            return False
        self._give("}" if self._keys else "{}", parts)
        return self._move_to(self._tail)

    def _key(self, held: str, parts: list[Part]) -> bool:
        """From the tag that opens an argument to its value."""
        tags = self._tags
        named = held[len(tags.open) :]
        known = next((key for key in self._known_keys if _may_begin(named, key + tags.key_end)), None)
        if known is not None and len(named) < len(known + tags.key_end):
            return False
        if known is None:
            key, end, rest = named.partition(tags.key_end)
        else:
            key, end, rest = known, tags.key_end, named[len(known + tags.key_end) :]
        rest = rest.lstrip() if tags.value else rest
        if not end or not rest.startswith(tags.value):
            may_come = tags.value.startswith(rest) if end else len(key) <= MAX_KEY_CHARS
            if may_come:
                return False
            self._give("}" if self._keys else "{}", parts)
            return self._move_to(self._gap)
        self._is_again, self._is_begun = key in self._keys, False
        self._keys.add(key)
        self._reader = self._reader_of(key)
        quoted = self._reader is not None and not self._reader.may_be_text
        self._end_of_value = _ValueEnd(tags.close, quoted=quoted)
        if not self._is_again:
            self._give(f"{'{' if len(self._keys) == 1 else ', '}{written(key)}: ", parts)
        self._held = rest[len(tags.value) :]
        return self._move_to(self._value)

    def _value(self, parts: list[Part]) -> bool:
        tags = self._tags
        is_text = self._reader is not None and self._reader.is_text
        if is_text and not self._is_begun:
            if tags.lined and not self._held:
                return False
            self._held = self._held.removeprefix("\n") if tags.lined else self._held
            self._is_begun = True
            self._give('"', parts)
        place = self._held.find(tags.close) if is_text else self._end_of_value.find(self._held)
        if place < 0:
            return self._more_text(parts)
        text = self._held[:place].removesuffix("\n") if tags.lined else self._held[:place]
        if self._is_begun:
            self._give(written(text)[1:], parts)
        else:
            self._give(
                as_json(text.removeprefix("\n") if tags.lined else text, self._reader, python=tags.python), parts
            )
        return self._move_to(self._arguments, place + len(tags.close))

    def _more_text(self, parts: list[Part]) -> bool:
        """Give out what surely belongs to the text. False, as its end has not come."""
        if self._is_begun:
            tags = self._tags
            ends = (tags.close, f"\n{tags.close}") if tags.lined else (tags.close,)
            length = len(self._held) - max(overlap(self._held, end) for end in ends)
            self._give(written(self._held[:length])[1:-1], parts)
            self._held = self._held[length:]
        return False

    def _give(self, arguments: str, parts: list[Part]) -> None:
        """More of the call's arguments, but of one that is there already."""
        if arguments and not (self._is_again and self._step == self._value):
            parts.append(CallPart(self.num_calls - 1, arguments=arguments))

    def _reader_of(self, key: str) -> ValueReader | None:
        if self._function is None:
            return None
        try:
            return reader_of(self._function.shapes, key)
        except Unenforceable:  # requests that need a grammar for it are refused
            return None

    def _names_of_arguments(self) -> list[str]:
        """Return the names in the function's schema, longest first."""
        if self._function is None:
            return []
        try:
            names = {name for shape in self._function.shapes.root_objects for name in shape.named}
        except Unenforceable:
            return []
        return sorted(names, key=len, reverse=True)


def _may_begin(text: str, begin: str) -> bool:
    """Whether `text`, which may be incomplete, may begin with `begin`."""
    return text.startswith(begin) or begin.startswith(text)
