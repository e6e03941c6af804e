"""Incremental detection of tool calls in an answer, by patterns of the text around names and arguments."""

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
"""Maximum length of a function name, as in OpenAI's API, and of white space. A longer run is text, not a call."""
MAX_PIECE_CHARS = 1024
"""Maximum length of text that is processed at once: each part that is found in it moves the rest of it."""
MAX_REST_CHARS = 4096
"""Maximum length of the part of an object that follows a call's arguments. A longer one is treated as text."""


class Missing(Enum):
    """Why a pattern did not match: more text is required, or no further text can make it match."""

    MORE = "more"
    NEVER = "never"


class Found(NamedTuple):
    """A match: the length `end` of the matched text, and the function name in it."""

    end: int
    name: str = ""


PatternPart = Callable[[str, int], int | Missing]
"""Matches at a position of a text. Returns the end position."""


class Pattern:
    """A sequence of parts: literal texts, `space`, `function_name`, `rest_of_object` and `peek`."""

    def __init__(self, *parts: str | PatternPart) -> None:
        self._parts = [exactly(part) if isinstance(part, str) else part for part in parts]

    def read(self, text: str) -> Found | Missing:
        """Match the pattern at the beginning of `text`."""
        position, found = 0, ""
        for part in self._parts:
            end = part(text, position)
            if isinstance(end, Missing):
                return end
            if part is function_name:
                found = text[position:end]
            position = end
        return Found(position, found)


def read_first(patterns: Iterable[Pattern], text: str) -> tuple[int, Found] | Missing:
    """Return the index and match of the first pattern that matches `text`, or MORE if one may still match."""
    missing = Missing.NEVER
    for number, pattern in enumerate(patterns):
        found = pattern.read(text)
        if isinstance(found, Found):
            return number, found
        missing = Missing.MORE if found is Missing.MORE else missing
    return missing


def exactly(wanted: str) -> PatternPart:
    """Match a literal text."""

    def read(text: str, position: int) -> int | Missing:
        if text.startswith(wanted, position):
            return position + len(wanted)
        return Missing.MORE if wanted.startswith(text[position:]) else Missing.NEVER

    return read


def one_of(*wanted: str) -> PatternPart:
    """Match one of several texts, none of which is a prefix of another."""
    parts = [exactly(text) for text in wanted]

    def read(text: str, position: int) -> int | Missing:
        ends = [part(text, position) for part in parts]
        found = [end for end in ends if not isinstance(end, Missing)]
        if found:
            return found[0]
        return Missing.MORE if Missing.MORE in ends else Missing.NEVER

    return read


def peek(*wanted: str) -> PatternPart:
    """Match one of several texts without consuming it."""
    part = one_of(*wanted)

    def read(text: str, position: int) -> int | Missing:
        end = part(text, position)
        return end if isinstance(end, Missing) else position

    return read


def space(text: str, position: int) -> int | Missing:
    """Match up to `MAX_BLANKS` white space characters. Another character must follow."""
    end = position
    while end < len(text) and text[end] in BLANK:
        end += 1
    if end - position > MAX_BLANKS:
        return Missing.NEVER
    return end if end < len(text) else Missing.MORE


def function_name(text: str, position: int) -> int | Missing:
    """Match a function name. Another character must follow."""
    end = position
    while end < len(text) and text[end] in NAME_CHARS:
        end += 1
    if end - position > MAX_NAME_CHARS or (end == position and end < len(text)):
        return Missing.NEVER
    return end if end < len(text) else Missing.MORE


def call_id(text: str, position: int) -> int | Missing:
    """Match the id of a call, whose characters are those of names."""
    return function_name(text, position)


def rest_of_object(text: str, position: int) -> int | Missing:
    """Match the rest of a JSON object after one of its values, including the closing brace."""
    start = space(text, position)
    if isinstance(start, Missing) or text[start] not in ",}":
        return start if isinstance(start, Missing) else Missing.NEVER
    extent = Extent(depth=1)
    end = position + extent.measure(text[position : position + MAX_REST_CHARS])
    if extent.complete:
        return end
    return Missing.NEVER if end - position == MAX_REST_CHARS else Missing.MORE


class Extent:
    """Incremental search for the end of a JSON object. `depth` is the number of brackets that are already open."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False
        self.complete = False

    def measure(self, text: str) -> int:
        """Return the number of characters of `text` that belong to the object."""
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


def short_string(text: str, position: int) -> int | Missing:
    """Match a JSON string of up to `MAX_NAME_CHARS` characters without escapes."""
    if position < len(text) and text[position] != '"':
        return Missing.NEVER
    end = text.find('"', position + 1)
    inner = text[position + 1 : end if end >= 0 else None]
    if len(inner) > MAX_NAME_CHARS or "\\" in inner or "\n" in inner:
        return Missing.NEVER
    return end + 1 if end >= 0 else Missing.MORE


def object_head(
    name_key: str, *argument_keys: str, before: Sequence[str | PatternPart] = ()
) -> tuple[str | PatternPart, ...]:
    """Return the parts of a call as a JSON object, up to its arguments. `before` are the members before its name."""
    return (
        *("{", space, *before, f'"{name_key}"', space, ":", space, '"', function_name, '"', space, ",", space),
        *(one_of(*[f'"{key}"' for key in argument_keys]), space, ":", space, peek("{")),
    )


def late_object_head(*argument_keys: str) -> tuple[str | PatternPart, ...]:
    """Return the parts of a call as a JSON object whose arguments precede its name, up to its arguments."""
    return "{", space, one_of(*[f'"{key}"' for key in argument_keys]), space, ":", space, peek("{")


def late_name(name_key: str) -> Pattern:
    """Return the pattern of a function's name after its arguments."""
    return Pattern(space, ",", space, f'"{name_key}"', space, ":", space, '"', function_name, '"')


OBJECT_HEAD = object_head("name", "arguments", "parameters")


class CallScanner(ABC):
    """Base class of scanners that split an answer into text, calls and reasoning as it arrives, in pieces of any size.

    `start` is the position of the first text in the answer. Each step consumes part of the held text, sets the next
    step, and returns whether to run it.
    """

    def __init__(self, *, start: int = 0) -> None:
        self.num_calls = 0
        self._held, self._end = "", start
        self._step: Callable[[list[Part]], bool] = self._begin

    @property
    def position(self) -> int:
        """Position in the answer up to which all text has been returned or was part of a delimiter."""
        return self._end - len(self._held)

    @property
    @abstractmethod
    def calls_are_whole(self) -> bool:
        """Whether each call that has begun has complete arguments."""

    def push(self, text: str) -> list[Part]:
        """Process more text. Return the new parts in order."""
        parts: list[Part] = []
        for begin in range(0, len(text), MAX_PIECE_CHARS):
            piece = text[begin : begin + MAX_PIECE_CHARS]
            self._held += piece
            self._end += len(piece)
            while self._step(parts):
                continue
        return joined(parts)

    @abstractmethod
    def flush(self, *, cut: bool) -> list[Part]:
        """Return the held text at the end of the answer. If the answer was `cut` off, drop what may begin a call."""

    @abstractmethod
    def _begin(self, parts: list[Part]) -> bool:
        """Run the first step."""

    def _emit_text(self, length: int, parts: list[Part]) -> bool:
        """Return the first characters of the held text as text. Returns False: more text is required."""
        if length:
            parts.append(TextPart(self._held[:length], self._end - len(self._held)))
            self._held = self._held[length:]
        return False

    def _move_to(self, step: Callable[[list[Part]], bool], skip: int = 0) -> bool:
        self._step, self._held = step, self._held[skip:]
        return True


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to write consecutive calls with JSON arguments.

    `head` matches from the opening delimiter to the first arguments, `tail` from the end of arguments to the end of the
    call, `again` from there to the next call's arguments, and `close` the end of the calls. `end` is a delimiter that
    may follow. `late` matches from the end of arguments to the end of the name, if the arguments precede it.
    """

    head: Pattern
    tail: Pattern
    again: Pattern | None = None
    close: Pattern | None = None
    end: str = ""
    late: Pattern | None = None


class MarkedScanner(CallScanner):
    """Scanner for consecutive calls that begin with one of the `openings`, in one of several layouts.

    With `only_calls`, an answer that does not begin with a call has none: it is JSON, whose strings may contain
    delimiters. Incomplete calls, and calls of functions not in `names` (unless None), are returned as text.
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
        self._begun = self._measured = 0
        """Range of the held text that belongs to arguments whose function is not known yet."""
        super().__init__(start=start)

    @property
    def calls_are_whole(self) -> bool:
        return self._step != self._arguments

    def flush(self, *, cut: bool) -> list[Part]:
        parts: list[Part] = []
        if self._step == self._between:
            self._held = self._held.lstrip()
        if not cut and self._step in (self._begin, self._text, self._head, self._late, self._between):
            self._emit_text(len(self._held), parts)
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
        """Return all further text as text."""
        return self._emit_text(len(self._held), parts)

    def _text(self, parts: list[Part]) -> bool:
        position, opening = first_mark(self._held, self._openings)
        self._emit_text(position, parts)
        return bool(opening) and self._move_to(self._head)

    def _head(self, parts: list[Part]) -> bool:
        """Read from an opening to the first arguments."""
        read = self._read_head()
        if read is Missing.MORE:
            return False
        if isinstance(read, Missing):
            self._emit_text(1, parts)
            return self._move_to(self._text)
        number, found = read
        self._layout = self._layouts[number]
        return self._call(found, parts)

    def _read_head(self) -> tuple[int, Found] | Missing:
        read = read_first([layout.head for layout in self._layouts], self._held)
        return read if isinstance(read, Missing) or self._is_known(read[1]) else Missing.NEVER

    def _is_known(self, found: Found) -> bool:
        return self._names is None or not found.name or found.name in self._names

    def _call(self, found: Found, parts: list[Part]) -> bool:
        self._extent = Extent()
        if self._layout.late is not None:
            self._begun = self._measured = found.end
            return self._move_to(self._late)
        parts.append(CallPart(self.num_calls, found.name))
        self.num_calls += 1
        return self._move_to(self._arguments, found.end)

    def _late(self, parts: list[Part]) -> bool:
        """Read arguments that precede the name of their function, and the name. Without a name, they are text."""
        assert self._layout.late is not None
        if not self._extent.complete:
            self._measured += self._extent.measure(self._held[self._measured :])
        read = self._layout.late.read(self._held[self._measured :]) if self._extent.complete else Missing.MORE
        if read is Missing.MORE:
            return False
        if isinstance(read, Missing) or not self._is_known(read):
            self._emit_text(self._measured, parts)
            return self._move_to(self._plain if self._only_calls and not self.num_calls else self._text)
        parts.append(CallPart(self.num_calls, read.name, self._held[self._begun : self._measured]))
        self.num_calls += 1
        return self._move_to(self._tail, self._measured + read.end)

    def _arguments(self, parts: list[Part]) -> bool:
        length = self._extent.measure(self._held)
        if length:
            parts.append(CallPart(self.num_calls - 1, arguments=self._held[:length]))
        self._held = self._held[length:]
        return self._extent.complete and self._move_to(self._tail)

    def _tail(self, parts: list[Part]) -> bool:
        """Read from the arguments to the end of the call."""
        read = self._layout.tail.read(self._held)
        if isinstance(read, Found):
            return self._move_to(self._between, read.end)
        return read is Missing.NEVER and self._move_to(self._gap)

    def _between(self, parts: list[Part]) -> bool:
        """Read the next consecutive call, or the end of the calls."""
        patterns: list[tuple[Layout | None, Pattern]] = [
            (each, each.again) for each in self._layouts if each.again is not None and self._continues(each)
        ]
        if self._layout.close is not None:
            patterns.append((None, self._layout.close))
        read = read_first([pattern for _, pattern in patterns], self._held)
        if read is Missing.MORE:
            return False
        if isinstance(read, Missing):
            return self._move_to(self._gap)
        (layout, _), found = patterns[read[0]], read[1]
        if layout is None:
            return self._move_to(self._gap, found.end)
        if not self._is_known(found):
            return self._move_to(self._gap)
        self._layout = layout
        return self._call(found, parts)

    def _continues(self, layout: Layout) -> bool:
        """Whether a call in another layout may follow one in the current layout."""
        return self._layout.again is not None and layout.end == self._layout.end

    def _gap(self, parts: list[Part]) -> bool:
        """Skip white space and the final delimiter after the calls."""
        self._held = self._held.lstrip()
        end = self._layout.end
        if end != self._held and end.startswith(self._held):
            return False
        return self._move_to(self._after, len(end) if self._held.startswith(end) else 0)

    def _after(self, parts: list[Part]) -> bool:
        """Skip white space after the final delimiter."""
        self._held = self._held.lstrip()
        return bool(self._held) and self._move_to(self._text)
