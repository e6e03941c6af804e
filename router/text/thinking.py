"""Separation of an answer into reasoning, between two marks at its beginning, and the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum

from router.text.parts import overlap
from router.text.thought_marks import ThoughtMarks

MAX_BLANKS = 4096
"""Maximum length of held white space. It is scanned again for each piece of an answer; longer runs are released."""


class ThoughtPosition(Enum):
    """Where a prompt ends: before a thought, after its start mark, within it, after its end mark, or in the answer."""

    BEFORE = "before"
    OPENED = "opened"
    WITHIN = "within"
    CLOSED = "closed"
    AFTER = "after"

    @classmethod
    def of(cls, marks: ThoughtMarks, prompt_end: str, continued: str) -> ThoughtPosition:
        """Determine the position from the last text of the prompt and the text of the message to continue, or ""."""
        if marks.begins_inside(prompt_end):
            return cls.OPENED
        if marks.open_thought(continued) is not None:
            return cls.WITHIN
        if marks.ends_closed(prompt_end):
            return cls.CLOSED
        return cls.AFTER if continued.strip() else cls.BEFORE

    @property
    def is_inside(self) -> bool:
        return self in (ThoughtPosition.OPENED, ThoughtPosition.WITHIN)

    @property
    def is_after(self) -> bool:
        return self in (ThoughtPosition.CLOSED, ThoughtPosition.AFTER)


class _State(Enum):
    BEGIN = "begin"
    THOUGHT = "thought"
    GAP = "gap"
    ANSWER = "answer"


class ThoughtTokens:
    """Counter for the tokens of reasoning at the beginning of an answer, including the marks.

    `raw` returns the bytes of a token. A mark may consist of several tokens, or share a token with other text. The
    answer begins with the start mark unless it `begins_inside`.
    """

    def __init__(self, raw: Callable[[int], bytes], marks: ThoughtMarks, *, begins_inside: bool) -> None:
        texts = (marks.end,) if begins_inside else (marks.start, marks.end)
        self._raw, self._tail, self._left = raw, b"", deque(text.encode() for text in texts)
        self.count = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens of the answer."""
        for token_id in token_ids:
            if not self._left:
                return
            self.count += 1
            seen = self._tail + self._raw(token_id)
            while self._left and self._left[0] in seen:
                _, _, seen = seen.partition(self._left.popleft())
            self._tail = seen[max(0, len(seen) - len(self._left[0]) + 1) :] if self._left else b""


class ThinkingScanner:
    """Splits an answer into reasoning and the text after it as it arrives. Strips white space around the reasoning.

    Also removes the head and the tail of the text, as the marks describe. If the prompt ends within the reasoning,
    white space at the beginning of the answer is kept. With `keeps_blanks`, nothing after the reasoning is removed. An
    answer that begins with neither reasoning nor a head is not changed.
    """

    def __init__(
        self,
        marks: ThoughtMarks,
        position: ThoughtPosition = ThoughtPosition.BEFORE,
        *,
        keeps_blanks: bool = False,
    ) -> None:
        self._start, self._end = marks.start, marks.end
        self._head, self._tail = ("", "") if keeps_blanks else (marks.head, marks.tail)
        self._begins_with_head = bool(self._head) and (marks.head_alone or position is ThoughtPosition.CLOSED)
        self._is_wrapped = False
        self._state = _State.THOUGHT if position.is_inside else _State.BEGIN
        self._held = ""
        self._thought = position is ThoughtPosition.WITHIN
        self._after = _State.ANSWER if keeps_blanks else _State.GAP
        self.is_thought = self._state is _State.THOUGHT
        """Whether the answer begins with reasoning; False while that is undecided."""

    @property
    def num_undecided(self) -> int:
        """Number of held characters that may belong to reasoning or to the answer."""
        return len(self._held) if self._state is _State.BEGIN else 0

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text so far that have not been returned."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str]:
        """Process more text. Return what it adds to the reasoning and to the answer."""
        self._held += text
        thought, said = "", ""
        if self._state is _State.BEGIN:
            self._look_for_begin()
        if self._state is _State.THOUGHT:
            thought = self._take_thought()
        if self._state is _State.GAP:
            self._cross_gap()
        if self._state is _State.ANSWER:
            length = len(self._held) - (self._num_ending() if self._is_wrapped else 0)
            said, self._held = self._held[:length], self._held[length:]
        return thought, said

    def flush(self, *, cut: bool) -> tuple[str, str]:
        """Return the held text at the end, as (reasoning, answer). If the answer was `cut`, drop a partial mark."""
        held, self._held = self._held, ""
        if self._state is _State.THOUGHT:
            return held[: len(held) - (overlap(held, self._end) if cut else 0)].rstrip(), ""
        if self._is_wrapped and self._state is _State.ANSWER:
            ends = held.rstrip().endswith(self._tail) or (cut and overlap(held, self._tail))
            said = "" if ends else held
        else:
            said = "" if cut else held
        self._held = held[len(said) :]
        return "", said

    def _look_for_begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._start):
            self._state, self._held, self.is_thought = _State.THOUGHT, begun.removeprefix(self._start), True
        elif self._begins_with_head and begun.startswith(self._head):
            self._state = _State.GAP
        elif not self._may_begin(begun) or len(self._held) > MAX_BLANKS:
            self._state = _State.ANSWER

    def _may_begin(self, begun: str) -> bool:
        """Whether `begun` may be the beginning of a start mark or a head."""
        return self._start.startswith(begun) or (self._begins_with_head and self._head.startswith(begun))

    def _cross_gap(self) -> None:
        """Remove white space before the answer, and its head."""
        self._held = self._held.lstrip()
        if self._head and self._held.startswith(self._head):
            self._held = self._held.removeprefix(self._head).lstrip()
            self._head, self._is_wrapped = "", bool(self._tail)
        if self._held and not self._head.startswith(self._held):
            self._state = _State.ANSWER

    def _num_ending(self) -> int:
        """Number of last characters that may be the tail and the white space around it."""
        text = self._held.rstrip()
        if text.endswith(self._tail):
            text = text.removesuffix(self._tail)
        elif text == self._held:
            text = text[: len(text) - overlap(text, self._tail)]
        num_chars = len(self._held) - len(text.rstrip())
        return num_chars if num_chars <= MAX_BLANKS else 0

    def _take_thought(self) -> str:
        """Remove and return the reasoning so far, without outer white space and a possible partial end mark."""
        before, found, after = self._held.partition(self._end)
        if found:
            self._state, self._held = self._after, after
        else:
            before = before[: len(before) - overlap(before, self._end)]
        thought = before.rstrip()
        if len(before) - len(thought) > MAX_BLANKS:
            thought = before
        if not found:
            self._held = self._held[len(thought) :]
        if not self._thought:
            thought = thought.lstrip()
        self._thought = self._thought or bool(thought)
        return thought
