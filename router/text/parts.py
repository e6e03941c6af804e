"""Parts of an answer in the order of its text (thoughts, text, calls of functions), and the marks between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtPart:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextPart:
    """More text for the user; `start` is the place of its first character in the answer as the model wrote it."""

    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of call number `index`: only its first part has the `name`, `arguments` are pieces of JSON."""

    index: int
    name: str = ""
    arguments: str = ""


Part = ThoughtPart | TextPart | CallPart


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts in their order, with neighbours of one kind, or of one call, joined; texts if nothing parts them."""
    groups: list[list[Part]] = []
    end = 0  # of the last text
    for part in parts:
        continues = bool(groups) and _kind(groups[-1][0]) == _kind(part)
        if isinstance(part, TextPart):
            continues = continues and part.start == end
            end = part.start + len(part.text)
        if continues:
            groups[-1].append(part)
        else:
            groups.append([part])
    return [_one(neighbours) for neighbours in groups]


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallPart) else 0


def _one(neighbours: Sequence[Part]) -> Part:
    first = neighbours[0]
    if len(neighbours) == 1:
        return first
    if isinstance(first, CallPart):
        arguments = [part.arguments for part in neighbours if isinstance(part, CallPart)]
        return CallPart(first.index, first.name, "".join(arguments))
    text = "".join([part.text for part in neighbours if not isinstance(part, CallPart)])
    return ThoughtPart(text) if isinstance(first, ThoughtPart) else TextPart(text, first.start)


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
