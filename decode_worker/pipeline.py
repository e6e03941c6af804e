"""Decode steps in flight: step N+1 is launched before the host has read the tokens of step N.

    launch N ── launch N+1 ── tokens of N ── launch N+2 ── tokens of N+1 ── ...

Sampling a row may depend on its token in step N (penalties, a grammar). The model of step N+1 then runs while the host
reads that token, and its rows are sampled afterwards.

A step that verifies draft tokens (`draft_tokens.py`) may be launched ahead, but the next step waits for its completion.
A sequence that ends with step N may already be in step N+1: its extra token is dropped, and the scheduler keeps its
blocks until that step has ended. Only steps in which every sequence decodes one token are launched ahead; other steps
wait until nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

from common.engine.models import NO_SLOT, ROW_BEFORE, SequenceChunk
from common.engine.run import ModelRunner
from common.engine.sampling import Sampler, SamplingRow
from common.engine.sequences import HiddenStateSlots, RowSlots
from common.wire import SampledToken
from decode_worker.drafting.model_drafts import TokenDrafter
from decode_worker.rules import StepMasks
from decode_worker.scheduler import DecodeChunk, DecodeScheduler

Sampled = TypeVar("Sampled")


class LaunchedStep(Protocol):
    """A launched step."""

    def sample(self, rows: Mapping[int, SamplingRow]) -> None:
        """Sample `rows` as given, and all others with their chunks' parameters. Call it before the next launch."""

    def read(self) -> list[SampledToken]:
        """Wait for the step and return a token for each row. Raises the device's error."""


class Launcher(Protocol):
    """Runs steps on a device in order, asynchronously (`StepLauncher`)."""

    def takes(self, chunks: Sequence[SequenceChunk]) -> bool: ...

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> LaunchedStep: ...

    def close(self) -> None:
        """Wait for the launched steps. No step may be launched afterwards."""


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """Components that compute tokens: `runner` computes steps, and `sampler` samples from their logits.

    A `launcher` launches steps ahead, before the tokens of the previous step are known. A `drafter` computes draft
    tokens.
    """

    runner: ModelRunner
    sampler: Sampler
    launcher: Launcher | None = None
    drafter: TokenDrafter | None = None


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step with the rows of `chunks`, in order. Times are engine clock, in seconds."""

    chunks: Sequence[DecodeChunk]
    step: LaunchedStep
    launched_at: float

    @property
    def has_drafts(self) -> bool:
        """Whether it verifies draft tokens, and may yield several tokens per sequence."""
        return any(chunk.draft.token_ids for chunk in self.chunks)


class Pipeline:
    """Pipeline of steps. Between iterations of the engine, at most one step is in flight; during a launch, two."""

    def __init__(
        self, scheduler: DecodeScheduler, launcher: Launcher | None, hidden: HiddenStateSlots | None = None
    ) -> None:
        self._scheduler, self._launcher, self._hidden = scheduler, launcher, hidden
        self.in_flight: StepInFlight | None = None

    def prepare(self, chunks: Sequence[DecodeChunk]) -> Sequence[SequenceChunk]:
        """Return the model's chunks for a step of `chunks`, or () if it cannot be launched ahead."""
        if self._launcher is None or not chunks:
            return ()
        prepared = model_chunks(chunks)
        if not self._launcher.takes(prepared):
            return ()
        return prepared if self._hidden is None else self.chunks(chunks)

    def chunks(self, chunks: Sequence[DecodeChunk]) -> Sequence[SequenceChunk]:
        """Return the model's chunks for a step that will run, with slots for hidden states of a draft head."""
        return model_chunks(chunks, self._hidden)

    def launch(
        self,
        chunks: Sequence[DecodeChunk],
        prepared: Sequence[SequenceChunk],
        masks: StepMasks,
        now: float,
        complete: Callable[[StepInFlight], None],
    ) -> None:
        """Start a step that continues the one in flight, and call `complete` with that one.

        Rows whose sampling depends on preceding tokens are sampled after these are known, others at once.
        """
        assert self._launcher is not None  # checked by `prepare`
        before = self.in_flight
        row_of = {id(chunk.sequence): row for row, chunk in enumerate(before.chunks)} if before else {}
        sources: list[int] = []
        for chunk in chunks:
            sources.append(row_of.get(id(chunk.sequence), -1))
            sources += [-1] * len(chunk.draft.token_ids)
        step = self._launcher.launch(prepared, sources)
        for chunk in chunks:
            self._scheduler.launched(chunk)
        self.in_flight = StepInFlight(tuple(chunks), step, now)
        try:
            special = [chunk for chunk in chunks if not chunk.is_plain]
            follows = any(masks.rules.follows_tokens(chunk.sequence) for chunk in special)
            if not follows:
                step.sample(self._rows(chunks, masks) if special else {})
        finally:  # nothing else refers to the step before
            if before is not None:
                complete(before)
        if follows:
            step.sample(self._rows(chunks, masks))

    def complete(self, step: StepInFlight) -> list[Sequence[SampledToken]]:
        """Wait for a step. Return the tokens by chunk, none for ended sequences. Raises the device's error."""
        if self.in_flight is step:
            self.in_flight = None
        try:
            tokens = step.step.read()
        except BaseException:
            for chunk in step.chunks:
                self._scheduler.failed(chunk)
            raise
        wanted = [self._scheduler.completed(chunk) for chunk in step.chunks]
        rows_of = by_chunk(tokens, [chunk.num_spans for chunk in step.chunks])
        return [rows if is_wanted else [] for rows, is_wanted in zip(rows_of, wanted, strict=True)]

    def _rows(self, chunks: Sequence[DecodeChunk], masks: StepMasks) -> dict[int, SamplingRow]:
        """Return the rows of a launched step that need more than their parameters to sample.

        Omits sequences that are deferred or ended with the previous step, whose tokens are dropped.
        """
        firsts = zip(chunks, starts_of([chunk.num_spans for chunk in chunks]), strict=True)
        special = [pair for pair in firsts if not pair[0].is_plain and self._scheduler.has(pair[0].sequence)]
        rows: dict[int, SamplingRow] = {}
        for (_, first), found in zip(special, masks.rows([chunk for chunk, _ in special]), strict=True):
            rows.update(enumerate(found, first))
        return rows

    def close(self) -> None:
        """Wait for the steps in flight and drop their tokens. Afterwards no step writes to a block."""
        if self._launcher is not None:
            self._launcher.close()


def model_chunks(chunks: Sequence[DecodeChunk], hidden: HiddenStateSlots | None = None) -> list[SequenceChunk]:
    """Return the model's chunks. Tokens that are still being sampled are 0.

    Each draft token is a separate chunk, computed as in a separate step.
    """
    prepared = []
    for chunk in chunks:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        tokens, drafted = sequence.token_ids[chunk.start : end] or (0,), chunk.draft.token_ids
        table, adapter, params = sequence.blocks, sequence.adapter, sequence.request.params
        places = RowSlots(NO_SLOT, [NO_SLOT] * chunk.num_spans)
        if hidden is not None:
            places = hidden.take(sequence, chunk.start, chunk.num_tokens, len(drafted))
        before, kept = places
        prepared.append(
            SequenceChunk(tokens, chunk.start, table, chunk.sample, chunk.all_logits, adapter, params, before, kept[0])
        )
        for place, (token_id, to) in enumerate(zip(drafted, kept[1:], strict=True), end):
            prepared.append(
                SequenceChunk((token_id,), place, table, adapter=adapter, params=params, before=ROW_BEFORE, kept=to)
            )
    return prepared


def by_chunk(sampled: Sequence[Sampled], counts: Sequence[int]) -> list[Sequence[Sampled]]:
    """Split the rows of a step into `counts` rows per chunk."""
    return [sampled[start : start + count] for start, count in zip(starts_of(counts), counts, strict=True)]


def starts_of(counts: Sequence[int]) -> list[int]:
    """Return the index of each chunk's first row."""
    return [0, *accumulate(counts)][:-1]
