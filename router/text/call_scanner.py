"""Finds the calls of functions in an answer while it arrives."""

from __future__ import annotations

from enum import Enum

from router.text.answer_part import CallPart, Part, TextPart, joined
from router.text.call_form import ARGUMENTS, END, NAME, OPEN, overlap


class _Place(Enum):
    """Where in an answer the scanner is."""

    BEGIN = "begin"  # an answer that either begins with a call or has none
    PLAIN = "plain"  # an answer without calls
    TEXT = "text"
    GAP = "gap"  # behind a call, where white space is not text
    NAME = "name"
    ARGUMENTS = "arguments"
    END = "end"  # of a call


class CallScanner:
    """Splits a text that follows `call_grammar` into parts as it arrives. The text may be cut off anywhere.

    `start` is the text's place in the answer. With `only_calls`, a text that does not begin with a call has none: it
    is JSON, whose strings may contain the mark of a call.
    """

    def __init__(self, *, start: int = 0, only_calls: bool = False) -> None:
        self.num_calls = 0
        self._place = _Place.BEGIN if only_calls else _Place.TEXT
        self._held, self._end = "", start
        self._extent = _Extent()

    @property
    def calls_are_whole(self) -> bool:
        """Whether each call that was begun has all of its arguments."""
        return self._place is not _Place.ARGUMENTS

    def push(self, text: str) -> list[Part]:
        """The parts that `text` adds, in its order: text between calls, and parts of calls."""
        self._held += text
        self._end += len(text)
        parts: list[Part] = []
        while self._advance(parts):
            continue
        return joined(parts)

    def flush(self, *, cut: bool) -> list[Part]:
        """Give out held text at the end, unless the answer was `cut` off: then it may be the beginning of a call."""
        parts: list[Part] = []
        if self._place in (_Place.BEGIN, _Place.TEXT) and not cut:
            self._say(self._held, parts)
        self._held = ""
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Take one part of the held text, and say whether there may be another."""
        match self._place:
            case _Place.BEGIN:
                return self._look_for_begin()
            case _Place.PLAIN:
                return self._say(self._held, parts)
            case _Place.TEXT:
                return self._take_text(parts)
            case _Place.GAP:
                self._held = self._held.lstrip()
                return bool(self._held) and self._move_to(_Place.TEXT, self._held)
            case _Place.NAME:
                return self._take_name(parts)
            case _Place.ARGUMENTS:
                return self._take_arguments(parts)
            case _Place.END:
                _, found, after = self._held.partition(END)
                return bool(found) and self._move_to(_Place.GAP, after)

    def _look_for_begin(self) -> bool:
        if len(self._held) < len(OPEN) and OPEN.startswith(self._held):
            return False
        return self._move_to(_Place.TEXT if self._held.startswith(OPEN) else _Place.PLAIN, self._held)

    def _take_text(self, parts: list[Part]) -> bool:
        said, found, after = self._held.partition(OPEN)
        if not found:
            said = said[: len(said) - overlap(said, OPEN)]
        self._say(said, parts)
        return bool(found) and self._move_to(_Place.NAME, after)

    def _take_name(self, parts: list[Part]) -> bool:
        head, found, after = self._held.partition(ARGUMENTS)
        if not found:
            return False
        parts.append(CallPart(self.num_calls, name=head.removeprefix(NAME)))
        self.num_calls += 1
        self._extent = _Extent()
        return self._move_to(_Place.ARGUMENTS, after)

    def _take_arguments(self, parts: list[Part]) -> bool:
        length = self._extent.measure(self._held)
        if length:
            parts.append(CallPart(self.num_calls - 1, arguments=self._held[:length]))
        self._held = self._held[length:]
        return self._extent.complete and self._move_to(_Place.END, self._held)

    def _say(self, text: str, parts: list[Part]) -> bool:
        """Give out `text`, which begins the held text. False, as the rest of it can hold no more parts yet."""
        if text:
            parts.append(TextPart(text, self._end - len(self._held)))
            self._held = self._held[len(text) :]
        return False

    def _move_to(self, place: _Place, held: str) -> bool:
        self._place, self._held = place, held
        return True


class _Extent:
    """Where a JSON object ends, as its text arrives."""

    def __init__(self) -> None:
        self._depth = 0
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
