"""Finds the calls of functions in an answer while it arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from router.text.calls.pattern import Extent, Found, Missing, Pattern, read_first
from router.text.marks import first_mark
from router.text.part import CallPart, Part, TextPart, joined


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
