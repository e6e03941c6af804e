"""Decode steps in flight: step N+1 is launched before the host has seen the tokens of step N.

    launch N ── launch N+1 ── tokens of N ── launch N+2 ── tokens of N+1 ── ...

A step that checks draft tokens (`draft_tokens.py`) may be launched ahead, but the next step waits until it has
completed. A sequence that ends with step N may be in step N+1 already: its extra token is dropped, and its blocks
linger with the scheduler until that step has ended. Only steps in which every sequence decodes one token are launched
ahead; any other step waits until nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

from common.model.batch import SequenceChunk
from common.sampling.sampler import SamplingRow
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import DecodeChunk

Sampled = TypeVar("Sampled")


class LaunchedTokens(Protocol):
    """The tokens that a launched step samples."""

    def read(self) -> list[int]:
        """Wait for the step: one token id for each of its rows. Raises the device's error."""


class Launcher(Protocol):
    """Runs steps on a device, in order, without waiting for them (`StepLauncher`)."""

    def takes(self, chunks: Sequence[SequenceChunk], rows: Sequence[SamplingRow]) -> bool: ...

    def launch(
        self, chunks: Sequence[SequenceChunk], sources: Sequence[int], rows: Sequence[SamplingRow]
    ) -> LaunchedTokens: ...

    def close(self) -> None:
        """Wait for the launched steps. No step may be launched afterwards."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step, with the rows of each of `chunks` in turn. Times are engine clock, in seconds."""

    chunks: Sequence[DecodeChunk]
    tokens: LaunchedTokens
    launched_at: float

    @property
    def has_drafts(self) -> bool:
        """Whether it checks draft tokens: then it may bring several tokens of a sequence."""
        return any(chunk.draft.token_ids for chunk in self.chunks)


class Pipeline:
    """At most one step is in flight between two turns of the engine; during a launch there are two."""

    def __init__(self, scheduler: DecodeScheduler, launcher: Launcher | None) -> None:
        self._scheduler, self._launcher = scheduler, launcher
        self.in_flight: StepInFlight | None = None

    @property
    def possible(self) -> bool:
        """Whether any step can be launched ahead here."""
        return self._launcher is not None

    def prepare(self, chunks: Sequence[DecodeChunk], rows: Sequence[SamplingRow]) -> Sequence[SequenceChunk]:
        """The model's chunks for a step of `chunks` and `rows`; none if it cannot be launched ahead."""
        if self._launcher is None or not chunks:
            return ()
        prepared = model_chunks(chunks)
        return prepared if self._launcher.takes(prepared, rows) else ()

    def launch(
        self,
        chunks: Sequence[DecodeChunk],
        prepared: Sequence[SequenceChunk],
        rows: Sequence[SamplingRow],
        now: float,
    ) -> StepInFlight | None:
        """Start a step, fed by the one in flight; returns the latter, which must be completed now."""
        assert self._launcher is not None  # `prepare` found one
        before = self.in_flight
        row_of = {id(chunk.sequence): row for row, chunk in enumerate(before.chunks)} if before else {}
        sources = [
            row_of.get(id(chunk.sequence), -1) if row == 0 else -1 for chunk in chunks for row in range(chunk.num_spans)
        ]
        tokens = self._launcher.launch(prepared, sources, rows)
        for chunk in chunks:
            self._scheduler.launched(chunk)
        self.in_flight = StepInFlight(tuple(chunks), tokens, now)
        return before

    def complete(self, step: StepInFlight) -> list[Sequence[int]]:
        """Wait for a step: the tokens of each chunk's rows, none for ended sequences. Raises the device's error."""
        if self.in_flight is step:
            self.in_flight = None
        try:
            token_ids = step.tokens.read()
        except BaseException:
            for chunk in step.chunks:
                self._scheduler.failed(chunk)
            raise
        wanted = [self._scheduler.completed(chunk) for chunk in step.chunks]
        rows_of = by_chunk(token_ids, [chunk.num_spans for chunk in step.chunks])
        return [rows if is_wanted else [] for rows, is_wanted in zip(rows_of, wanted, strict=True)]

    def close(self) -> None:
        """Wait for the steps in flight and drop their tokens. No step writes to a block afterwards."""
        if self._launcher is not None:
            self._launcher.close()


def model_chunks(chunks: Sequence[DecodeChunk]) -> list[SequenceChunk]:
    """The model's chunks. A token that is still being sampled is unknown here: 0 stands for it.

    Each draft token is a chunk of its own, computed as in a step of its own.
    """
    prepared = []
    for chunk in chunks:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        tokens = sequence.token_ids[chunk.start : end]
        prepared.append(
            SequenceChunk(
                tokens or (0,), chunk.start, sequence.blocks, chunk.sample, chunk.all_logits, sequence.adapter
            )
        )
        for place, token_id in enumerate(chunk.draft.token_ids, end):
            prepared.append(SequenceChunk((token_id,), place, sequence.blocks, adapter=sequence.adapter))
    return prepared


def by_chunk(sampled: Sequence[Sampled], counts: Sequence[int]) -> list[Sequence[Sampled]]:
    """Split the rows of a step: `counts` rows for each chunk."""
    ends = list(accumulate(counts))
    return [sampled[end - count : end] for end, count in zip(ends, counts, strict=True)]
