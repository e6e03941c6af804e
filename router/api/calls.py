"""The calls in an answer that may have some: taken out of its text as it arrives, choice by choice."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.router.api.choice import Choice, Piece
from diptych.router.text.tools import CallPart, CallScanner


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


class AnswerCalls:
    """With `possible` False all text is text."""

    def __init__(self, *, possible: bool) -> None:
        self._possible = possible
        self._scanners: dict[int, CallScanner] = {}
        self._id = uuid.uuid4().hex

    def taken_apart(self, choice: Choice, piece: Piece) -> tuple[str, list[CallPart]]:
        """The text that a piece adds to the content, and to calls."""
        if not self._possible:
            return piece.text, []
        scanner = self._scanners.setdefault(choice.index, CallScanner())
        text, parts = scanner.push(piece.text)
        return (text + scanner.flush() if piece.finish_reason else text), parts

    def finish_reason(self, choice: Choice, reason: str) -> str:
        """`reason`, or "tool_calls" where an answer that ended by itself has some."""
        scanner = self._scanners.get(choice.index)
        return "tool_calls" if reason == "stop" and scanner is not None and scanner.num_calls else reason

    def id_of(self, choice: Choice, index: int) -> str:
        return f"call_{self._id}_{choice.index}_{index}"

    def whole(self, choice: Choice, parts: Sequence[CallPart]) -> list[Call]:
        """All calls of a choice, from all of its parts."""
        names = [part.name for part in parts if part.name]
        arguments = ["".join([part.arguments for part in parts if part.index == i]) for i in range(len(names))]
        return [Call(self.id_of(choice, i), *pair) for i, pair in enumerate(zip(names, arguments, strict=True))]
