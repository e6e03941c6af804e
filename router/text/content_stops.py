"""Stop strings for answers with reasoning and tool calls. They apply to content only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.text.calls import CallScanner
from router.text.parts import Part, TextPart
from router.text.stop_strings import StopScanner
from router.text.thinking import ThinkingScanner


class ContentStops:
    """Searches content for stop strings, ignoring reasoning, calls and delimiters.

    Returns the raw answer, like a `StopScanner`. Holds back text that may begin a delimiter or a stop string. Stop
    strings do not match across a call. `calls_from` creates a call scanner for an answer that begins at a position, or
    is None if the answer has no calls.
    """

    def __init__(
        self,
        stops: StopScanner,
        thinking: ThinkingScanner | None,
        calls_from: Callable[[int], CallScanner] | None,
    ) -> None:
        self._stops, self._thinking, self._calls_from = stops, thinking, calls_from
        self._calls: CallScanner | None = None
        self._is_begun = thinking is None
        self._unread, self._num_chars = "", 0
        """Text that has not been returned, and the number of characters received."""
        self._text_end = self._num_held = self._cut = self._first_end = 0
        """End of the latest content, number of its characters held by the stop scanner, position at which a stop
        string cut the answer, and first position at which a stop string may end."""

    @property
    def stop(self) -> str | None:
        """The stop string that was found, or None."""
        return self._stops.stop

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Return the text that can be shown, and whether a stop string ended it; see `StopScanner.push`."""
        if self.stop is not None:
            return "", True
        self._unread += text
        self._num_chars += len(text)
        if not may_end:
            self._first_end = self._num_chars
        if self._thinking is None:
            return self._read(text), self.stop is not None
        return self._read(self._thinking.push(text)[1]), self.stop is not None

    def flush(self, *, cut: bool = False) -> str:
        """Return the held text at the end of an answer, up to a stop string. `cut`: the answer was truncated."""
        if self.stop is not None:
            return ""
        said = "" if self._thinking is None else self._thinking.flush(cut=cut)[1]
        shown = self._read(said)
        if self.stop is None and self._calls is not None and self._finds_stop(self._calls.flush(cut=cut)):
            return shown + self._released(self._cut)
        return shown if self.stop is not None else shown + self._released(self._num_chars)

    def _read(self, said: str) -> str:
        """Process more text after the reasoning. Return the text of the answer that can be shown."""
        self._is_begun = self._is_begun or bool(said)
        if not self._is_begun:
            undecided = 0 if self._thinking is None else self._thinking.num_undecided
            return self._released(self._num_chars - undecided)
        read = self._num_chars if self._thinking is None else self._num_chars - self._thinking.num_held
        start = read - len(said)
        if self._calls_from is None:
            parts: Sequence[Part] = [TextPart(said, start)]
        else:
            self._calls = self._calls or self._calls_from(start)
            parts = self._calls.push(said)
        if self._finds_stop(parts):
            return self._released(self._cut)
        end = read if self._calls is None else self._calls.position
        return self._released(end - self._num_held if end == self._text_end else end)

    def _finds_stop(self, parts: Sequence[Part]) -> bool:
        for part in parts:
            if not isinstance(part, TextPart):
                continue
            if part.start != self._text_end:  # after a call
                self._stops.flush()
                self._num_held = 0
            self._text_end = part.start + len(part.text)
            num_first = max(0, self._first_end - part.start)
            for text, start, may_end in (
                (part.text[:num_first], part.start, False),
                (part.text[num_first:], part.start + num_first, True),
            ):
                shown, stopped = self._stops.push(text, may_end=may_end)
                if stopped:
                    self._cut = start - self._num_held + len(shown)
                    return True
                self._num_held += len(text) - len(shown)
        return False

    def _released(self, end: int) -> str:
        """Return the text up to position `end` of the answer that has not been returned yet."""
        length = max(0, end - (self._num_chars - len(self._unread)))
        shown, self._unread = self._unread[:length], self._unread[length:]
        return shown
