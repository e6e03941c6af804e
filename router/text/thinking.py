"""Separation of an answer into reasoning, between `<think>` and `</think>` at its beginning, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from router.text.parts import overlap

OPEN, CLOSE = "<think>", "</think>"
MAX_BLANKS = 4096
"""Maximum length of held white space. It is scanned again for each piece of an answer; longer runs are released."""
TAIL_TOKENS = 16
"""Number of last prompt tokens whose text shows whether the prompt opens the reasoning. A byte tokenizer needs nine."""


class _State(Enum):
    BEGIN = "begin"
    THOUGHT = "thought"
    GAP = "gap"
    ANSWER = "answer"


def thinks(template: str | None) -> bool:
    """Whether the chat template belongs to a model that reasons in this format."""
    return template is not None and CLOSE in template


def begins_inside(prompt_end: str) -> bool:
    """Whether the prompt itself opens the reasoning, as some templates do."""
    return prompt_end.rstrip().endswith(OPEN)


def open_thought(text: str) -> str | None:
    """Return the unfinished reasoning at the end of `text`, without its opening tag, or None."""
    _, mark, thought = text.rpartition(OPEN)
    return thought if mark and CLOSE not in thought else None


class ThoughtTokens:
    """Counter for the tokens of reasoning at the beginning of an answer, including the closing tag.

    `raw` returns the bytes of a token. The tag may consist of several tokens, or share a token with other text.
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
    """Splits an answer into reasoning and the text after it as it arrives. Strips white space around the reasoning.

    `inside`: the prompt opened the reasoning. `continued`: the prompt ends within it, so white space at the beginning
    of the answer is kept. An answer that does not begin with reasoning is not changed.
    """

    def __init__(self, *, inside: bool, continued: bool = False) -> None:
        self._state = _State.THOUGHT if inside or continued else _State.BEGIN
        self._held = ""
        self._thought = continued
        self.is_thought = self._state is _State.THOUGHT
        """Whether the answer begins with reasoning; False while that is undecided."""

    @property
    def num_undecided(self) -> int:
        """Number of held characters that may belong to reasoning or to the answer."""
        return len(self._held) if self._state is _State.BEGIN else 0

    def push(self, text: str) -> tuple[str, str]:
        """Process more text. Return what it adds to the reasoning and to the answer."""
        self._held += text
        thought, said = "", ""
        if self._state is _State.BEGIN:
            self._look_for_begin()
        if self._state is _State.THOUGHT:
            thought = self._take_thought()
        if self._state is _State.GAP:
            self._held = self._held.lstrip()
            self._state = _State.ANSWER if self._held else _State.GAP
        if self._state is _State.ANSWER:
            said, self._held = self._held, ""
        return thought, said

    def flush(self, *, cut: bool) -> tuple[str, str]:
        """Return the held text at the end, as (reasoning, answer). If the answer was `cut`, drop a partial tag."""
        held, self._held = self._held, ""
        if self._state is _State.THOUGHT:
            return held[: len(held) - (overlap(held, CLOSE) if cut else 0)].rstrip(), ""
        return "", held if self._state is _State.BEGIN and not cut else ""

    def _look_for_begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._state, self._held, self.is_thought = _State.THOUGHT, begun.removeprefix(OPEN), True
        elif not OPEN.startswith(begun) or len(self._held) > MAX_BLANKS:
            self._state = _State.ANSWER

    def _take_thought(self) -> str:
        """Remove and return the reasoning so far, without outer white space and a possible partial closing tag."""
        before, found, after = self._held.partition(CLOSE)
        if found:
            self._state, self._held = _State.GAP, after
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
