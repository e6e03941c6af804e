"""Runs decode steps of a CPU on a thread of their own, one after the other, each fed with the tokens of the one before.

    engine   launch N+1 │ tokens of N, messages, commands │ launch N+2 │ ...
    steps    ... step N │ step N+1                                     │ step N+2

A step's tensors are made when it is launched; only its token ids are filled in when it begins. So nothing but that
lies between two steps, and what the engine has to do in between happens beside the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from common.model.batch import ForwardBatch, SequenceChunk
from common.runner.runner import ModelRunner
from common.sampling.sampler import Sampler, SamplingRow


class SampledTokens:
    """What a launched step samples."""

    def __init__(self, future: Future[list[int]]) -> None:
        self._future = future

    def read(self) -> list[int]:
        """Wait for the step: one token id for each of its rows. Raises what the step raised, or the one before it."""
        return self._future.result()


class StepThread:
    """Implements the decode worker's `Launcher`. Steps of one engine: nobody else may run the model meanwhile."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner, self._sampler = runner, sampler
        self._steps = ThreadPoolExecutor(1, "steps")
        self._last: SampledTokens | None = None

    def takes(self, chunks: Sequence[SequenceChunk], rows: Sequence[SamplingRow]) -> bool:
        """Whether `launch` can run these chunks, each of which samples by its row."""
        single = all(chunk.sample and len(chunk.token_ids) == 1 for chunk in chunks)
        return single and len(rows) == len(chunks) and self._sampler.can_launch(rows)

    def launch(
        self, chunks: Sequence[SequenceChunk], sources: Sequence[int], rows: Sequence[SamplingRow]
    ) -> SampledTokens:
        """Start a step. Chunk i runs the token that row `sources[i]` of the step before sampled, or its own for -1.

        As many threads compute it as the calling one may use now. Errors as `ModelRunner.prepare`.
        """
        batch = self._runner.prepare(chunks)
        before = self._last if max(sources) >= 0 else None
        self._last = SampledTokens(
            self._steps.submit(self._run, batch, before, tuple(sources), tuple(rows), torch.get_num_threads())
        )
        return self._last

    def close(self) -> None:
        """Let the steps that were launched end. From then on nothing writes to their blocks."""
        self._steps.shutdown()

    def _run(
        self,
        batch: ForwardBatch,
        before: SampledTokens | None,
        sources: Sequence[int],
        rows: Sequence[SamplingRow],
        num_threads: int,
    ) -> list[int]:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if before is not None:
            token_ids, fed = batch.token_ids.numpy(), before.read()
            for row, source in enumerate(sources):
                if source >= 0:
                    # An id that is no token marks logits that are not numbers: the engine will end its request.
                    token_ids[row] = fed[source] if fed[source] < self._sampler.vocab_size else 0
        logits = self._runner.run(batch)
        return [sampled.token_id for sampled in self._sampler.sample(logits, rows)]
