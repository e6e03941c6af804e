"""Finds the calls of functions in an answer while it arrives, by patterns of the text around names and arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from router.text.parts import CallPart, Part, TextPart, first_mark, joined

BLANK = frozenset(" \t\r\n")
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
MAX_NAME_CHARS, MAX_BLANKS = 64, 64
"""Of a function's name, as OpenAI has it, and of white space: a longer run is text, not a call."""
MAX_REST_CHARS = 4096
"""Maximum length of an object after its call's arguments. It is parsed again for each piece; a longer rest is text."""
BLANKS = r"[ \t\r\n]{0,8}"
"""White space that a grammar of calls allows where the format has some: too little to fill an answer with."""


class Missing(Enum):
    """Why a pattern is not found: the text may yet become one, or can never be one."""

    MORE = "more"
    NEVER = "never"


class Found(NamedTuple):
    """The pattern is the first `end` characters; `name` is the first name in it."""

    end: int
    name: str = ""


PatternPart = Callable[[str, int], int | Missing]
"""Reads from a place in a text on: where it ends."""


class Pattern:
    """Consecutive parts of text: literal texts, `space`, `function_name`, `rest_of_object` and `peek`."""

    def __init__(self, *parts: str | PatternPart) -> None:
        self._parts = [exactly(part) if isinstance(part, str) else part for part in parts]

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


def exactly(wanted: str) -> PatternPart:
    """Exactly this text."""

    def read(text: str, place: int) -> int | Missing:
        if text.startswith(wanted, place):
            return place + len(wanted)
        return Missing.MORE if wanted.startswith(text[place:]) else Missing.NEVER

    return read


def one_of(*wanted: str) -> PatternPart:
    """One of some texts, none of which begins with another."""
    parts = [exactly(text) for text in wanted]

    def read(text: str, place: int) -> int | Missing:
        ends = [part(text, place) for part in parts]
        found = [end for end in ends if not isinstance(end, Missing)]
        if found:
            return found[0]
        return Missing.MORE if Missing.MORE in ends else Missing.NEVER

    return read


def peek(wanted: str) -> PatternPart:
    """Exactly this text, which belongs to what follows."""
    part = exactly(wanted)

    def read(text: str, place: int) -> int | Missing:
        end = part(text, place)
        return end if isinstance(end, Missing) else place

    return read


def peek_one_of(*wanted: str) -> PatternPart:
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
    """The rest of a JSON object after one of its values, with its closing brace."""
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


OBJECT_HEAD: tuple[str | PatternPart, ...] = (
    *("{", space, '"name"', space, ":", space, '"', function_name, '"', space, ",", space),
    *(one_of('"arguments"', '"parameters"'), space, ":", space, peek("{")),
)
"""A call as a JSON object, to the beginning of its arguments."""


class CallScanner(ABC):
    """Splits an answer into text, calls and thoughts as it arrives. The text may be cut off anywhere.

    `start` is the text's place in the answer. Each step takes one part of the held text and returns whether there may
    be another; it names the step that comes next.
    """

    def __init__(self, *, start: int = 0) -> None:
        self.num_calls = 0
        self._held, self._end = "", start
        self._step: Callable[[list[Part]], bool] = self._begin

    @property
    def place(self) -> int:
        """Position in the answer up to which all text belongs to returned parts or to marks."""
        return self._end - len(self._held)

    @property
    @abstractmethod
    def calls_are_whole(self) -> bool:
        """Whether each call that was begun has all of its arguments."""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` adds, in its order."""
        self._held += text
        self._end += len(text)
        parts: list[Part] = []
        while self._step(parts):
            continue
        return joined(parts)

    @abstractmethod
    def flush(self, *, cut: bool) -> list[Part]:
        """Give out held text at the end, unless the answer was `cut` off: then it may be the beginning of a call."""

    @abstractmethod
    def _begin(self, parts: list[Part]) -> bool:
        """The first step."""

    def _say(self, length: int, parts: list[Part]) -> bool:
        """Give out the first characters of the held text as text. False, as the rest holds no more parts yet."""
        if length:
            parts.append(TextPart(self._held[:length], self._end - len(self._held)))
            self._held = self._held[length:]
        return False

    def _move_to(self, step: Callable[[list[Part]], bool], skip: int = 0) -> bool:
        self._step, self._held = step, self._held[skip:]
        return True


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to write a row of calls with arguments in JSON.

    `head` goes from the mark that opens the row to the first arguments, `tail` from the end of arguments to the end of
    the call, `again` from there to the next call's arguments, and `close` ends the row.
    """

    head: Pattern
    tail: Pattern
    again: Pattern | None = None
    close: Pattern | None = None


class MarkedScanner(CallScanner):
    """Finds rows of calls that begin with one of the `openings`, in one of some layouts.

    With `only_calls`, a text that does not begin with a call has none: it is JSON, whose strings may contain a mark.
    What only begins like a call is text, as is a call of a function that is none of `names`, where these are given.
    """

    def __init__(
        self,
        openings: Sequence[str],
        layouts: Sequence[Layout],
        *,
        start: int = 0,
        only_calls: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        self._openings, self._layouts, self._names = openings, layouts, names
        self._layout, self._extent = layouts[0], Extent()
        self._only_calls = only_calls
        super().__init__(start=start)

    @property
    def calls_are_whole(self) -> bool:
        return self._step != self._arguments

    def flush(self, *, cut: bool) -> list[Part]:
        parts: list[Part] = []
        if self._step == self._between:
            self._held = self._held.lstrip()
        if not cut and self._step in (self._begin, self._text, self._head, self._between):
            self._say(len(self._held), parts)
        self._held = ""
        return parts

    def _begin(self, parts: list[Part]) -> bool:
        if not self._only_calls:
            return self._move_to(self._text)
        read = self._read_head()
        if read is Missing.MORE:
            return False
        return self._move_to(self._plain if read is Missing.NEVER else self._head)

    def _plain(self, parts: list[Part]) -> bool:
        """The rest is text."""
        return self._say(len(self._held), parts)

    def _text(self, parts: list[Part]) -> bool:
        place, opening = first_mark(self._held, self._openings)
        self._say(place, parts)
        return bool(opening) and self._move_to(self._head)

    def _head(self, parts: list[Part]) -> bool:
        """From an opening to the first arguments."""
        read = self._read_head()
        if read is Missing.MORE:
            return False
        if isinstance(read, Missing):
            self._say(1, parts)
            return self._move_to(self._text)
        number, found = read
        self._layout = self._layouts[number]
        return self._call(found, parts)

    def _read_head(self) -> tuple[int, Found] | Missing:
        read = read_first([layout.head for layout in self._layouts], self._held)
        return read if isinstance(read, Missing) or self._is_known(read[1]) else Missing.NEVER

    def _is_known(self, found: Found) -> bool:
        return self._names is None or found.name in self._names

    def _call(self, found: Found, parts: list[Part]) -> bool:
        parts.append(CallPart(self.num_calls, name=found.name))
        self.num_calls += 1
        self._extent = Extent()
        return self._move_to(self._arguments, found.end)

    def _arguments(self, parts: list[Part]) -> bool:
        length = self._extent.measure(self._held)
        if length:
            parts.append(CallPart(self.num_calls - 1, arguments=self._held[:length]))
        self._held = self._held[length:]
        return self._extent.complete and self._move_to(self._tail)

    def _tail(self, parts: list[Part]) -> bool:
        """From the arguments to the end of the call."""
        read = self._layout.tail.read(self._held)
        if isinstance(read, Found):
            return self._move_to(self._between, read.end)
        return read is Missing.NEVER and self._move_to(self._gap)

    def _between(self, parts: list[Part]) -> bool:
        """Behind a call: another one of its row, or the end of the row."""
        again, close = self._layout.again, self._layout.close
        read = read_first([pattern for pattern in (again, close) if pattern is not None], self._held)
        if read is Missing.MORE:
            return False
        if isinstance(read, Missing):
            return self._move_to(self._gap)
        if again is not None and read[0] == 0:
            return self._call(read[1], parts) if self._is_known(read[1]) else self._move_to(self._gap)
        return self._move_to(self._gap, read[1].end)

    def _gap(self, parts: list[Part]) -> bool:
        """Behind a row of calls, where white space is not text."""
        self._held = self._held.lstrip()
        return bool(self._held) and self._move_to(self._text)
