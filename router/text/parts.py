"""Parts of an answer (reasoning, text and tool calls) in order, and search for the delimiters between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtPart:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextPart:
    """More text for the user. `start` is the position of its first character in the model's raw answer."""

    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of call number `index`. Only its first part has a `name`. `arguments` are pieces of JSON."""

    index: int
    name: str = ""
    arguments: str = ""


Part = ThoughtPart | TextPart | CallPart


def joined(parts: Iterable[Part]) -> list[Part]:
    """Merge adjacent parts of the same kind or call. Texts are merged only if they are contiguous in the answer."""
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
    """Return the length of the longest proper prefix of `mark` that `text` ends with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """Find the first of several delimiters in `text`. Return its position and the delimiter.

    Without one, return the position of a possible incomplete delimiter, or the text's length, and "".
    """
    found = [(position, mark) for mark in marks if (position := text.find(mark)) >= 0]
    if found:
        return min(found, key=lambda at: (at[0], -len(at[1])))
    return len(text) - max((overlap(text, mark) for mark in marks), default=0), ""
