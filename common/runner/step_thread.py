"""Runs decode steps of a CPU on a thread of their own, each with the tokens of the one before.

    engine   launch N+1 │ tokens of N, messages, commands │ launch N+2 │ ...
    steps    ... step N │ step N+1                                     │ step N+2

`launch` makes a step's tensors; only its token ids are filled in when it begins. So the engine works on messages while
the next step already runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from common.model.batch import ForwardBatch, SequenceChunk
from common.runner.runner import ModelRunner
from common.sampling.sampler import Sampler, SamplingRow


class SampledTokens:
    """The tokens of a launched step."""

    def __init__(self, future: Future[list[int]]) -> None:
        self._future = future

    def read(self) -> list[int]:
        """Waits for the step: one token id for each row. Raises the error of the step, or of the one before it."""
        return self._future.result()


class StepThread:
    """Implements the decode worker's `Launcher`. No other thread may run the model meanwhile."""

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
        """Starts a step. Chunk i runs the token that row `sources[i]` of the step before sampled, or its own for -1.

        It uses as many threads as torch has at the time of the call. Errors as `ModelRunner.prepare`.
        """
        batch = self._runner.prepare(chunks)
        before = self._last if max(sources) >= 0 else None
        self._last = SampledTokens(
            self._steps.submit(self._run, batch, before, tuple(sources), tuple(rows), torch.get_num_threads())
        )
        return self._last

    def close(self) -> None:
        """Waits for the launched steps. Afterwards nothing writes to their blocks."""
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
                    # An id that is no token marks logits that are not finite: the engine ends its request later.
                    token_ids[row] = fed[source] if fed[source] < self._sampler.vocab_size else 0
        logits = self._runner.run(batch)
        return [sampled.token_id for sampled in self._sampler.sample(logits, rows)]
