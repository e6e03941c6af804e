"""Decode steps in flight: step N+1 is launched before the host has seen the tokens of step N.

    launch N ── launch N+1 ── tokens of N ── launch N+2 ── tokens of N+1 ── ...

A sequence that ends with step N may be in step N+1 already. Its extra token is discarded, and its blocks linger with
the scheduler until that step has ended. Only steps in which every sequence decodes one token are launched ahead; any
other step waits until nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.common.model.batch import SequenceChunk
from diptych.common.model.sampler import SamplingRow
from diptych.decode_worker.scheduler import DecodeChunk, DecodeScheduler


class Tokens(Protocol):
    """What a launched step samples."""

    def read(self) -> list[int]:
        """Wait for the step: one token id for each of its rows. Raises what the device failed with."""


class Launcher(Protocol):
    """Runs steps on a device, in order, without waiting for them (`StepLauncher`)."""

    def takes(self, chunks: Sequence[SequenceChunk], rows: Sequence[SamplingRow]) -> bool: ...

    def launch(
        self, chunks: Sequence[SequenceChunk], sources: Sequence[int], rows: Sequence[SamplingRow]
    ) -> Tokens: ...

    def close(self) -> None:
        """Wait for what was launched. Nothing is launched after it."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: row i is `chunks[i]`. Times are engine clock, in seconds."""

    chunks: Sequence[DecodeChunk]
    tokens: Tokens
    launched_at: float


class StepsInFlight:
    """At most one flight is under way between two turns of the engine; during a launch there are two."""

    def __init__(self, scheduler: DecodeScheduler, launcher: Launcher | None) -> None:
        self._scheduler, self._launcher = scheduler, launcher
        self.flight: Flight | None = None

    @property
    def possible(self) -> bool:
        """Whether any step can be launched ahead here."""
        return self._launcher is not None

    def prepare(self, chunks: Sequence[DecodeChunk], rows: Sequence[SamplingRow]) -> Sequence[SequenceChunk]:
        """What a step of `chunks`, which sample by `rows`, is to run; nothing if it cannot be launched ahead."""
        if self._launcher is None or not chunks:
            return ()
        prepared = [model_chunk(chunk) for chunk in chunks]
        return prepared if self._launcher.takes(prepared, rows) else ()

    def launch(
        self,
        chunks: Sequence[DecodeChunk],
        prepared: Sequence[SequenceChunk],
        rows: Sequence[SamplingRow],
        now: float,
    ) -> Flight | None:
        """Start a step, fed by the one in flight: returns that one, which is now to be landed."""
        assert self._launcher is not None  # it took what was prepared
        before = self.flight
        row_of = {id(chunk.sequence): row for row, chunk in enumerate(before.chunks)} if before else {}
        sources = [row_of.get(id(chunk.sequence), -1) for chunk in chunks]
        tokens = self._launcher.launch(prepared, sources, rows)
        for chunk in chunks:
            self._scheduler.launched(chunk)
        self.flight = Flight(tuple(chunks), tokens, now)
        return before

    def land(self, flight: Flight) -> list[tuple[DecodeChunk, int]]:
        """Wait for a flight: the chunks whose sequences want their token, with it. Raises what the step raised."""
        if self.flight is flight:
            self.flight = None
        try:
            token_ids = flight.tokens.read()
        except BaseException:
            for chunk in flight.chunks:  # it has ended, badly: nothing of it writes any more
                self._scheduler.completed(chunk.sequence)
            raise
        wanted = [self._scheduler.completed(chunk.sequence) for chunk in flight.chunks]
        landed = zip(flight.chunks, token_ids, wanted, strict=True)
        return [(chunk, token_id) for chunk, token_id, is_wanted in landed if is_wanted]

    def close(self) -> None:
        """From now on nothing writes to a block. The tokens of a step in flight are lost."""
        if self._launcher is not None:
            self._launcher.close()


def model_chunk(chunk: DecodeChunk) -> SequenceChunk:
    """What the model is to run. A token that is still being sampled is unknown here: 0 stands for it."""
    sequence = chunk.sequence
    tokens = sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return SequenceChunk(tokens or (0,), chunk.start, sequence.blocks, chunk.sample, chunk.score)
