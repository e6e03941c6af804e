"""Incremental parser of answers: splits each choice into thoughts, text and tool calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import orjson

from router.generation.choice import AnswerChoice, Piece
from router.generation.served_model import ServedModel
from router.generation.structure import ToolCalling, is_constrained, takes_breaks, tool_calling
from router.generation.thoughts import position_of
from router.request.fields import ChatRequest, SamplingFields
from router.text import (
    ContentStops,
    Part,
    StopScanner,
    TextPart,
    ThinkingScanner,
    ThoughtMarks,
    ThoughtPart,
    ThoughtPosition,
    ThoughtTokens,
    joined,
)
from router.text.calls import CallScanner, ChannelTokens


@dataclass(slots=True)
class _Scanners:
    """The scanners of one choice. `num_chars` counts characters read. `calls` is created at the first text."""

    thinking: ThinkingScanner | None
    thought_tokens: ThoughtTokens | ChannelTokens | None
    calls: CallScanner | None = None
    num_chars: int = 0

    @property
    def num_reasoning_tokens(self) -> int:
        thinks = self.thinking is None or self.thinking.is_thought
        return self.thought_tokens.count if self.thought_tokens is not None and thinks else 0


def is_scanned(model: ServedModel, calling: ToolCalling | None) -> bool:
    """Whether the tool-call format's scanner must read the answers, for calls or for channels."""
    return model.dialect.parses and (calling is not None or model.dialect.format.has_channels)


def thoughts_of(model: ServedModel, fields: ChatRequest, calling: ToolCalling | None) -> ThoughtMarks | None:
    """Return the marks of thoughts in answers; None if answers must have a form from the first token."""
    if model.config.reasoning_in_form and is_constrained(fields, calling):
        return None
    return model.thoughts_of(with_tools=calling is not None)


def marks_of(model: ServedModel, fields: ChatRequest, calling: ToolCalling | None) -> frozenset[int]:
    """Return the special tokens to keep in the text of the answers, because scanners look for them."""
    marks = model.marks if is_scanned(model, calling) else frozenset[int]()
    thoughts = thoughts_of(model, fields, calling)
    return marks if thoughts is None else marks | model.thought_tokens[thoughts]


class AnswerParts:
    """Splits the answers of one request into parts: thoughts if the model thinks, tool calls if tools are allowed."""

    def __init__(self, model: ServedModel, fields: SamplingFields) -> None:
        """`fields` must be a `ChatRequest`; requests of other APIs are translated to one."""
        assert isinstance(fields, ChatRequest)
        calling = tool_calling(fields)
        self._model, self._shows_thought = model, fields.include_reasoning is not False
        self._is_scanned, self._form = is_scanned(model, calling), model.dialect.format
        self._functions = {function.name: function for function in calling.functions} if calling is not None else {}
        self._has_thoughts = model.shows_thoughts
        self._only_calls = is_constrained(fields, calling)  # or only another form
        self._continued = fields.continued_text
        self._thoughts = thoughts_of(model, fields, calling)
        self._keeps_blanks = self._only_calls and not takes_breaks(fields, calling)
        self._scanners: dict[int, _Scanners] = {}
        self._id = secrets.token_hex(12)  # longer ids of calls exceed OpenAI's limit of 40 characters

    @property
    def only_text(self) -> bool:
        """Whether answers consist of text only and do not have to be split."""
        return not self._is_scanned and self._thoughts is None

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens of all choices so far, including their marks."""
        return sum(scanners.num_reasoning_tokens for scanners in self._scanners.values())

    def stop_scanner(self, stops: StopScanner, prompt_token_ids: Sequence[int]) -> StopScanner | ContentStops:
        """Create the scanner that finds stop strings in the content of one answer."""
        if self.only_text:
            return stops
        return ContentStops(stops, self._thinking_of(prompt_token_ids), self._calls_from if self._is_scanned else None)

    def split(self, choice: AnswerChoice, piece: Piece) -> list[Part]:
        """Split a piece into parts, in text order. Adjacent parts differ in kind or in their call."""
        scanners = self._scanners_of(choice)
        scanners.num_chars += len(piece.text)
        if scanners.thought_tokens is not None:
            scanners.thought_tokens.push(piece.token_ids)
        thought, text = _without_thought(scanners.thinking, piece)
        parts: list[Part] = [ThoughtPart(thought)] if thought and self._shows_thought else []
        num_held = 0 if scanners.thinking is None else scanners.thinking.num_held
        start = scanners.num_chars - num_held - len(text)
        if not self._is_scanned:
            return [*parts, TextPart(text, start)] if text else parts
        if scanners.calls is None and text:
            scanners.calls = self._calls_from(start)
        if scanners.calls is not None:
            found = scanners.calls.push(text)
            if piece.finish_reason:
                found += scanners.calls.flush(cut=piece.finish_reason != "stop")
            parts += [part for part in found if self._shows_thought or not isinstance(part, ThoughtPart)]
        return joined(parts)

    def whole(self, choice: AnswerChoice, pieces: Iterable[Piece]) -> list[Part]:
        """Return all parts of a choice in text order, with adjacent parts of a kind merged."""
        return joined([part for piece in pieces for part in self.split(choice, piece)])

    def finish_reason(self, choice: AnswerChoice, reason: str) -> str:
        """Return `reason`, or "tool_calls" for a stopped answer with complete calls."""
        calls = self._scanners_of(choice).calls
        called = calls is not None and calls.num_calls and calls.calls_are_whole
        return "tool_calls" if reason == "stop" and called else reason

    def calls_are_whole(self, choice: AnswerChoice) -> bool:
        """Whether every call of a choice so far has complete arguments."""
        calls = self._scanners_of(choice).calls
        return calls is None or calls.calls_are_whole

    def id_of(self, choice: AnswerChoice, index: int) -> str:
        """Return the id of call `index`."""
        return f"call_{self._id}_{choice.index}_{index}"

    def _scanners_of(self, choice: AnswerChoice) -> _Scanners:
        scanners = self._scanners.get(choice.index)
        if scanners is None:
            thinking = self._thinking_of(choice.request.prompt_token_ids)
            scanners = self._scanners[choice.index] = _Scanners(thinking, self._thought_tokens(thinking))
        return scanners

    def _calls_from(self, start: int) -> CallScanner:
        return self._form.scanner(
            start=start, only_calls=self._only_calls, functions=self._functions, thoughts=self._has_thoughts
        )

    def _thought_tokens(self, thinking: ThinkingScanner | None) -> ThoughtTokens | ChannelTokens | None:
        raw = self._model.text.token_bytes
        if thinking is not None and self._thoughts is not None:
            return ThoughtTokens(raw, self._thoughts, begins_inside=thinking.is_thought)
        if self._is_scanned and self._form.has_channels and self._has_thoughts:
            return ChannelTokens(raw, self._functions)
        return None

    def _thinking_of(self, prompt_token_ids: Sequence[int]) -> ThinkingScanner | None:
        if self._thoughts is None:
            return None
        position = position_of(self._model, self._thoughts, prompt_token_ids, self._continued)
        may_have_head = position is ThoughtPosition.CLOSED and self._thoughts.head and not self._keeps_blanks
        if self._only_calls and position.is_after and not may_have_head:
            return None  # the form begins with the first token
        return ThinkingScanner(self._thoughts, position, keeps_blanks=self._keeps_blanks)


def _without_thought(scanner: ThinkingScanner | None, piece: Piece) -> tuple[str, str]:
    """Split a piece into its thought and the text after it."""
    if scanner is None:
        return "", piece.text
    thought, text = scanner.push(piece.text)
    if piece.finish_reason:
        more_thought, more_text = scanner.flush(cut=piece.finish_reason != "stop")
        thought, text = thought + more_thought, text + more_text
    return thought, text


def arguments_of(arguments: str) -> object:
    """Return the arguments of a tool call as an object for `orjson`; {} for a call that `max_tokens` cut off.

    Arguments with numbers that exceed a double, which streams contain as written, stay text.
    """
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        with suppress(ValueError, RecursionError):
            json.loads(arguments, parse_constant=int)  # raises for NaN and Infinity, which are not JSON
            return orjson.Fragment(arguments)
        return {}
