"""Launcher of prompt steps with all their outputs: first tokens, prompt log probabilities, or vectors.

On a GPU, launched steps run asynchronously until their outputs are read. On a CPU, a step has ended when `launch`
returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.models import SequenceChunk
from common.engine.run import ModelRunner
from common.engine.sampling import (
    LaunchedLogprobs,
    LaunchedTokens,
    Sampler,
    SamplingRow,
    launch_chunk_logprobs,
    separate,
)
from common.engine.sequences import NO_SLOTS, HiddenStateSlots
from common.wire import Pooling, SampledToken, TokenLogprobs
from kernels import Linear, on_device, to_host
from prefill_worker.scheduler import PrefillChunk


class Pooler:
    """Pools hidden states by `pooling`. With a `score` head, float32 [labels, hidden_size], returns its outputs."""

    def __init__(self, pooling: Pooling, score: Linear | None = None) -> None:
        self.pooling, self._score = pooling, score

    @torch.inference_mode()
    def launch(
        self, chunks: Sequence[PrefillChunk], last: Tensor, rows_of_chunks: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Start to copy the vectors [n, width] of the n prompts that end with these chunks to the host. None if n is 0.

        `last` are the hidden states of the last tokens of these prompts, [n, hidden_size]. `rows_of_chunks` are those
        of all tokens of each chunk, for the mean.
        """
        ended = [chunk.sequence for chunk in chunks if chunk.sample]
        if self.pooling == "mean":
            for chunk, rows in zip(chunks, rows_of_chunks, strict=True):
                if rows is not None:
                    before, here = chunk.sequence.hidden_sum, rows.sum(0, dtype=torch.float64)
                    chunk.sequence.hidden_sum = here if before is None else before + here
            means = [s.hidden_sum / s.num_tokens for s in ended if s.hidden_sum is not None]
            last = torch.stack(means).float() if means else last
        if not ended:
            return None
        return to_host(last if self._score is None else self._score(last))


def packed(vectors: Tensor) -> list[bytes]:
    """Return host vectors as little-endian float32 bytes, or b"" for vectors that are not finite."""
    finite = torch.isfinite(vectors).all(1).tolist()
    rows = (row.astype("<f4").tobytes() for row in vectors.numpy())
    return [row if is_finite else b"" for row, is_finite in zip(rows, finite, strict=True)]


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """Output of a chunk: requested log probabilities, and at the end of a prompt its first token or vector."""

    logprobs: Sequence[TokenLogprobs] = ()
    sampled: SampledToken | None = None
    vector: bytes | None = None


class LaunchedPrompts(Protocol):
    """A launched step."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended or failed, so that `read` does not wait."""

    def read(self) -> Sequence[ChunkOutput]:
        """Wait for the step and return the output of each chunk. Raises the device's error."""


@dataclass(frozen=True, slots=True)
class DevicePrompts:
    """Implementation of `LaunchedPrompts`. On a GPU, `mark` is the event at the end of the step; None on a CPU."""

    runner: ModelRunner
    ends: Sequence[bool]
    logprobs: Sequence[Sequence[LaunchedLogprobs]]
    tokens: LaunchedTokens | None
    vectors: Tensor | None
    mark: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        try:
            return self.mark is None or bool(self.mark.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # the device has failed, `read` raises the error

    def read(self) -> Sequence[ChunkOutput]:
        if self.mark is not None:
            with self.runner.waiting():
                self.mark.synchronize()
        sampled = iter(self.tokens.read() if self.tokens is not None else ())
        vectors = iter(packed(self.vectors) if self.vectors is not None else ())
        outputs = []
        for is_end, launched in zip(self.ends, self.logprobs, strict=True):
            logprobs = [found for each in launched for found in each.read()]
            end = (next(sampled, None), next(vectors, None)) if is_end else (None, None)
            outputs.append(ChunkOutput(logprobs, *end))
        return outputs


class PromptLauncher:
    """Launcher with a runner and a sampler, or a pooler for models that embed or score. Steps run in launch order."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        pooler: Pooler | None = None,
        hidden: HiddenStateSlots | None = None,
    ) -> None:
        self._runner, self._sampler, self._pooler, self._hidden = runner, sampler, pooler, hidden

    @property
    def vocab_size(self) -> int:
        return self._sampler.vocab_size

    @property
    def pooling(self) -> Pooling:
        """Pooling of prompts, or "" if they end with a token."""
        return "" if self._pooler is None else self._pooler.pooling

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step has ended."""
        return self._runner.kv.device.type == "cuda"

    def clear_slots(self, block: int, first: int) -> None:
        """Zero the slots of a block from `first` on, before the next step runs."""
        self._runner.kv.clear_slots(block, first)

    def launch(self, chunks: Sequence[PrefillChunk], rows: Sequence[SamplingRow]) -> LaunchedPrompts:
        """Start a step. `rows` are the sampling rows of the prompts that end with it.

        Raises the errors of `ModelRunner.forward`. After any error, call `close` before blocks are reused.
        """
        with on_device(self._runner.kv.device), torch.inference_mode():
            asked = [self._model_chunk(chunk) for chunk in chunks]
            last, rows_of_chunks = separate(self._runner.forward(asked), asked)
            ends = [chunk.sample for chunk in chunks]
            if self._pooler is not None:
                vectors = self._pooler.launch(chunks, last, rows_of_chunks)
                return DevicePrompts(self._runner, ends, [()] * len(chunks), None, vectors, self._mark())
            logprobs = [_launch_logprobs(*pair) for pair in zip(chunks, rows_of_chunks, strict=True)]
            tokens = self._sampler.launch(last, self._sampler.prepare(rows)) if rows else None
            return DevicePrompts(self._runner, ends, logprobs, tokens, None, self._mark())

    def close(self) -> None:
        """Wait for all launched steps, unless the device has failed. Afterwards nothing writes to blocks."""
        self._runner.finish()

    def device_failure(self) -> str:
        """See `ModelRunner.device_failure`."""
        return self._runner.device_failure()

    def _mark(self) -> torch.cuda.Event | None:
        if self._runner.kv.device.type != "cuda":
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def _model_chunk(self, chunk: PrefillChunk) -> SequenceChunk:
        sequence = chunk.sequence
        places = NO_SLOTS if self._hidden is None else self._hidden.take(sequence, chunk.start, chunk.num_tokens)
        return SequenceChunk(
            sequence.token_ids[chunk.start : chunk.end],
            chunk.start,
            sequence.blocks,
            chunk.sample,
            chunk.all_logits,
            sequence.adapter,
            before=places.before,
            kept=places.kept[0],
        )


def _launch_logprobs(chunk: PrefillChunk, logits: Tensor | None) -> Sequence[LaunchedLogprobs]:
    if logits is None:
        return ()
    sequence = chunk.sequence
    prompt = sequence.token_ids[: sequence.num_request_tokens]
    return launch_chunk_logprobs(logits, prompt, chunk.start, sequence.params.prompt_logprobs)
