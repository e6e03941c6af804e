"""Marks in a model's answers, such as `<think>`: texts that belong to the form of an answer and not to its content."""

from __future__ import annotations

from collections.abc import Iterable


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """The first of some marks in `text`: where it begins, and which it is.

    Without one: where a mark may begin that is not complete yet, at most the end of the text, and "".
    """
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        return min(found, key=lambda at: (at[0], -len(at[1])))
    return len(text) - max((overlap(text, mark) for mark in marks), default=0), ""
