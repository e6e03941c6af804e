"""What models think before they speak: the text between `<think>` and `</think>` at an answer's begin."""

from __future__ import annotations

from enum import Enum

from router.text.tools import overlap

OPEN, CLOSE = "<think>", "</think>"


class _Place(Enum):
    BEGIN = "begin"
    THOUGHT = "thought"
    GAP = "gap"
    ANSWER = "answer"


def thinks(template: str | None) -> bool:
    """Whether a model thinks in this form, by its chat template."""
    return template is not None and CLOSE in template


def begins_inside(prompt_end: str) -> bool:
    """Whether the answer to a prompt that ends so begins amid a thought: some templates open it themselves."""
    return prompt_end.rstrip().endswith(OPEN)


class ThinkingScanner:
    """Takes an answer apart into a thought and what follows it, as it arrives. Blanks around a thought are left out.

    An answer that does not begin with a thought, `inside` or with its mark, is given as it is.
    """

    def __init__(self, *, inside: bool) -> None:
        self._place = _Place.THOUGHT if inside else _Place.BEGIN
        self._held = ""
        self._thought = False

    def push(self, text: str) -> tuple[str, str]:
        """What this adds to the thought, and to the answer."""
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
        """What was held back, at the end. Where the answer was `cut` off, what may begin a mark is left out."""
        held, self._held = self._held, ""
        if self._place is _Place.THOUGHT:
            return held[: len(held) - (overlap(held, CLOSE) if cut else 0)].rstrip(), ""
        return "", held if self._place is _Place.BEGIN and not cut else ""

    def _look_for_begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._place, self._held = _Place.THOUGHT, begun.removeprefix(OPEN)
        elif not OPEN.startswith(begun):
            self._place = _Place.ANSWER

    def _take_thought(self) -> str:
        """All but the blanks at both ends, and what may be the closing mark."""
        before, found, after = self._held.partition(CLOSE)
        if found:
            self._place, self._held = _Place.GAP, after
        else:
            before = before[: len(before) - overlap(before, CLOSE)]
        thought = before.rstrip()
        if not found:
            self._held = self._held[len(thought) :]
        if not self._thought:
            thought = thought.lstrip()
        self._thought = self._thought or bool(thought)
        return thought
