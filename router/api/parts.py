"""What an answer is made of: a thought, text and calls, taken apart as it arrives, choice by choice."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diptych.router.api.choice import Choice, Piece
from diptych.router.api.fields import ChatRequest, SamplingFields
from diptych.router.api.service import Service
from diptych.router.api.structure import is_held, tool_calling
from diptych.router.text.thinking import ThinkingScanner, begins_inside
from diptych.router.text.tools import CallPart, CallScanner

TAIL_TOKENS = 8
"""Of a prompt, which its last characters are in."""


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


class Parts(NamedTuple):
    """What a piece adds to an answer's thought, to its text and to its calls."""

    thought: str
    text: str
    calls: list[CallPart]


class AnswerParts:
    """Of the answers to one request: calls where tools may be called, a thought where the model thinks.

    A model whose answer is held to a form from its first token cannot think before it.
    """

    def __init__(self, service: Service, fields: SamplingFields) -> None:
        """`fields` are a `ChatRequest`, or what another API's request means as one."""
        assert isinstance(fields, ChatRequest)
        calling = tool_calling(fields)
        self._text, self._shows_thought = service.text, fields.include_reasoning is not False
        self._calls_possible = calling is not None
        self._thinks = service.thinks and not is_held(fields, calling)
        self._callers: dict[int, CallScanner] = {}
        self._thinkers: dict[int, ThinkingScanner] = {}
        self._id = uuid.uuid4().hex

    def taken_apart(self, choice: Choice, piece: Piece) -> Parts:
        """What a piece adds."""
        thought, text = self._without_thought(choice, piece)
        if not self._calls_possible:
            return Parts(thought, text, [])
        scanner = self._callers.setdefault(choice.index, CallScanner())
        text, parts = scanner.push(text)
        return Parts(thought, text + scanner.flush() if piece.finish_reason else text, parts)

    def finish_reason(self, choice: Choice, reason: str) -> str:
        """`reason`, or "tool_calls" where an answer that ended by itself has some."""
        scanner = self._callers.get(choice.index)
        return "tool_calls" if reason == "stop" and scanner is not None and scanner.num_calls else reason

    def id_of(self, choice: Choice, index: int) -> str:
        return f"call_{self._id}_{choice.index}_{index}"

    def whole(self, choice: Choice, parts: Sequence[CallPart]) -> list[Call]:
        """All calls of a choice, from all of its parts."""
        names = [part.name for part in parts if part.name]
        arguments = ["".join([part.arguments for part in parts if part.index == i]) for i in range(len(names))]
        return [Call(self.id_of(choice, i), *pair) for i, pair in enumerate(zip(names, arguments, strict=True))]

    def _without_thought(self, choice: Choice, piece: Piece) -> tuple[str, str]:
        if not self._thinks:
            return "", piece.text
        scanner = self._thinkers.get(choice.index)
        if scanner is None:
            tail = self._text.tokenizer.decode(
                choice.request.prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False
            )
            scanner = self._thinkers[choice.index] = ThinkingScanner(inside=begins_inside(tail))
        thought, text = scanner.push(piece.text)
        if piece.finish_reason:
            more_thought, more_text = scanner.flush()
            thought, text = thought + more_thought, text + more_text
        return thought if self._shows_thought else "", text
