"""Splits an answer into the model's reasoning, between `<think>` and `</think>` at its beginning, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from router.text.parts import overlap

OPEN, CLOSE = "<think>", "</think>"
MAX_BLANKS = 4096
"""Maximum held white space, in characters. It is read again for each piece of an answer; more is released."""
TAIL_TOKENS = 16
"""Last tokens of a prompt, whose text shows whether it opens a thought: a tokenizer of bytes needs nine."""


class _Place(Enum):
    BEGIN = "begin"
    THOUGHT = "thought"
    GAP = "gap"
    ANSWER = "answer"


def thinks(template: str | None) -> bool:
    """Whether the chat template is that of a model that reasons in this form."""
    return template is not None and CLOSE in template


def begins_inside(prompt_end: str) -> bool:
    """Whether the prompt itself opens the thought, as some templates do."""
    return prompt_end.rstrip().endswith(OPEN)


def open_thought(text: str) -> str | None:
    """Return the unfinished thought at the end of `text`, without its mark, or None."""
    _, mark, thought = text.rpartition(OPEN)
    return thought if mark and CLOSE not in thought else None


class ThoughtTokens:
    """Counts the tokens of a thought at the beginning of an answer, up to and including its closing mark.

    `raw` returns the bytes of a token. The mark may consist of several tokens, or share a token with other text.
    """

    def __init__(self, raw: Callable[[int], bytes]) -> None:
        self._raw, self._end, self._tail, self._ended = raw, CLOSE.encode(), b"", False
        self.count = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens of the answer."""
        for token_id in token_ids:
            if self._ended:
                return
            self.count += 1
            seen = self._tail + self._raw(token_id)
            self._ended = self._end in seen
            self._tail = seen[1 - len(self._end) :]


class ThinkingScanner:
    """Splits an answer into a thought and the text after it as it arrives, without white space around the thought.

    `inside`: the prompt opened the thought. `continued`: the prompt ends within its text, so white space at the
    beginning of the answer belongs to the thought. An answer that does not begin with a thought is not changed.
    """

    def __init__(self, *, inside: bool, continued: bool = False) -> None:
        self._place = _Place.THOUGHT if inside or continued else _Place.BEGIN
        self._held = ""
        self._thought = continued
        self.is_thought = self._place is _Place.THOUGHT
        """Whether the answer begins with a thought, or may still do so."""

    @property
    def num_undecided(self) -> int:
        """Number of held characters that may begin a thought or the answer."""
        return len(self._held) if self._place is _Place.BEGIN else 0

    def push(self, text: str) -> tuple[str, str]:
        """The text that this adds to the thought, and to the answer behind it."""
        self._held += text
        thought, said = "", ""
        if self._place is _Place.BEGIN:
            self._look_for_begin()
        if self._place is _Place.THOUGHT:
            thought = self._take_thought()
        if self._place is _Place.GAP:
            self._held = self._held.lstrip()
            self._place = _Place.ANSWER if self._held else _Place.GAP
        if self._place is _Place.ANSWER:
            said, self._held = self._held, ""
        return thought, said

    def flush(self, *, cut: bool) -> tuple[str, str]:
        """Held text at the end: (thought, answer). If the answer was `cut` off, a possible mark is dropped."""
        held, self._held = self._held, ""
        if self._place is _Place.THOUGHT:
            return held[: len(held) - (overlap(held, CLOSE) if cut else 0)].rstrip(), ""
        return "", held if self._place is _Place.BEGIN and not cut else ""

    def _look_for_begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._place, self._held, self.is_thought = _Place.THOUGHT, begun.removeprefix(OPEN), True
        elif not OPEN.startswith(begun) or len(self._held) > MAX_BLANKS:
            self._place = _Place.ANSWER

    def _take_thought(self) -> str:
        """The thought so far, without white space at both ends and without a possible part of the closing mark."""
        before, found, after = self._held.partition(CLOSE)
        if found:
            self._place, self._held = _Place.GAP, after
        else:
            before = before[: len(before) - overlap(before, CLOSE)]
        thought = before.rstrip()
        if len(before) - len(thought) > MAX_BLANKS:
            thought = before
        if not found:
            self._held = self._held[len(thought) :]
        if not self._thought:
            thought = thought.lstrip()
        self._thought = self._thought or bool(thought)
        return thought
