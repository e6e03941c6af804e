"""Serialisation of answers, complete or as server-sent events: the interface, and OpenAI's chat and completion APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import orjson

from common.errors import RequestError
from router.dispatch import FIRST_WEIGHTS
from router.generation.choice import AnswerChoice, Piece
from router.generation.plan import AnswerPlan
from router.generation.request_log import RequestLog
from router.generation.served_model import ServedModel
from router.request.errors import error_object

Object = dict[str, object]


class ChoiceFormatter(Protocol):
    """Formatter of choices as JSON objects. `prompt_token_ids` is None unless the client requested them."""

    object: str
    chunk_object: str
    only_text: bool
    """Whether the chunks in the middle of a stream differ only in their text."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The number of reasoning tokens so far; None if the API does not report them in its usage."""
        ...

    def opening(self, choice: AnswerChoice, prompt_token_ids: list[int] | None) -> Object | None:
        """Return the choice in a stream's first chunk; None if the API has no such chunk."""
        ...

    def chunks(self, choice: AnswerChoice, piece: Piece, *, at_least_one: bool) -> list[Object]:
        """Return the stream chunks of a piece; an empty list if the piece adds nothing.

        With `at_least_one`, such a piece gets an empty chunk, which carries the usage so far.
        """
        ...

    def whole(self, choice: AnswerChoice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        """Return a complete choice."""
        ...

    def envelope(self, first: AnswerChoice, prompt_token_ids: list[int] | None) -> Object:
        """Return the members of the answer, or of a stream's first chunk, other than its choices."""
        ...


DONE = b"data: [DONE]\n\n"
ANY_TEXT = "\0text\0"
"""Placeholder for the text of a chunk."""


class AnswerSerializer(Protocol):
    """Serialiser of one answer. A stream is `opening`, one `chunk` per piece, then `ending` or `error`."""

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        """Return the complete answer. `pieces` has one list per choice."""
        ...

    def opening(self) -> bytes:
        """Return the first bytes of a stream, before its first piece."""
        ...

    def chunk(self, choice: AnswerChoice, piece: Piece) -> bytes:
        """Return the bytes of a piece; may be empty."""
        ...

    def ending(self) -> bytes:
        """Return the last bytes of a stream whose choices are finished."""
        ...

    def error(self, error: RequestError) -> bytes:
        """Return the last bytes of a stream that fails."""
        ...


class OpenAISerializer:
    """Writes chunks as `data:` events; a `ChoiceFormatter` formats their choices."""

    def __init__(self, model: ServedModel, plan: AnswerPlan, formatter: ChoiceFormatter, log: RequestLog) -> None:
        self._plan, self._formatter, self._log = plan, formatter, log
        fields = plan.fields
        options = fields.stream_options
        self._usage_at_end = bool(fields.stream) and options is not None and bool(options.include_usage)
        self._usage_always = bool(fields.stream) and options is not None and bool(options.continuous_usage_stats)
        self._returns_ids = bool(fields.return_token_ids)
        self._head: Object = {
            "id": plan.id,
            "object": formatter.chunk_object if fields.stream else formatter.object,
            "created": plan.created,
            "model": plan.model,
            "system_fingerprint": model.fingerprint,
        }
        self._repeats = formatter.only_text and not self._usage_always
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by choice index
        # A chunk with one choice and no other members always has these bytes before and after the choice.
        self._before = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._behind = b'],"usage":null}\n\n' if self._usage_at_end else b"]}\n\n"

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Object:
        choices = [  # encoded one at a time: the log-probability objects of a thousand choices would take gigabytes
            orjson.Fragment(
                orjson.dumps(
                    {
                        **self._formatter.whole(choice, pieces[choice.index], self._prompt_ids(choice.prompt)),
                        "index": index,
                    }
                )
            )
            for index, choice in enumerate(self._plan.shown_choices)
        ]
        return self._head | {"choices": choices, "usage": self._usage()} | self._envelope()

    def opening(self) -> bytes:
        """Return the first chunk of every choice; empty if the API has no such chunks."""
        openings = [self._formatter.opening(choice, self._prompt_ids(choice.prompt)) for choice in self._plan.choices]
        events: list[bytes] = []
        extra = self._envelope()
        for opening in filter(None, openings):
            events.append(self._data([opening], extra))
            extra = {}
        return b"".join(events)

    def chunk(self, choice: AnswerChoice, piece: Piece) -> bytes:
        if piece.text and self._repeats and not (piece.finish_reason or piece.first):  # the common case
            before, behind = self._around.get(choice.index) or self._around_text(choice)
            return b"%b%b%b" % (before, orjson.dumps(piece.text), behind)
        chunks = self._formatter.chunks(choice, piece, at_least_one=self._usage_always)
        if self._usage_always:
            return b"".join([self._data([chunk]) for chunk in chunks])
        return b"".join([b"%b%b%b" % (self._before, orjson.dumps(chunk), self._behind) for chunk in chunks])

    def _around_text(self, choice: AnswerChoice) -> tuple[bytes, bytes]:
        """Return the constant bytes before and after the text in a choice's chunks, so only the text is encoded."""
        (chunk,) = self._formatter.chunks(choice, Piece(ANY_TEXT), at_least_one=False)
        first, _, last = orjson.dumps(chunk).partition(orjson.dumps(ANY_TEXT))
        around = self._around[choice.index] = (self._before + first, last + self._behind)
        return around

    def ending(self) -> bytes:
        return (self._data([], {"usage": self._usage()}) if self._usage_at_end else b"") + DONE

    def error(self, error: RequestError) -> bytes:
        return event(error_object(error))

    def _data(self, choices: list[Object], extra: Object | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._usage_always:
            chunk["usage"] = self._usage()
        elif self._usage_at_end:
            chunk["usage"] = None
        if extra:
            chunk |= extra
        return event(chunk)

    def _envelope(self) -> Object:
        version = self._log.client_request.weight_version
        updated: Object = {"metadata": {"weight_version": version}} if version not in ("", FIRST_WEIGHTS) else {}
        return self._formatter.envelope(self._plan.choices[0], self._prompt_ids(0)) | updated

    def _prompt_ids(self, prompt: int) -> list[int] | None:
        """Return the token ids of a prompt; None if the client did not request them."""
        return list(self._plan.prompts[prompt].token_ids) if self._returns_ids else None

    def _usage(self) -> Object:
        num_prompt_tokens, num_output_tokens = self._plan.num_prompt_tokens, self._log.num_output_tokens
        usage: Object = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._log.num_cached_tokens},
        }
        if (num_reasoning := self._formatter.num_reasoning_tokens) is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage


def event(data: object, kind: str = "") -> bytes:
    """Encode a server-sent event. `kind` is its event name; "" for APIs without event names."""
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + orjson.dumps(data) + b"\n\n"
