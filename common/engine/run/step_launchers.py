"""Launchers of whole decode steps (model and sampling) that do not wait for tokens, for GPUs and CPUs.

A GPU runs launched steps asynchronously, and their tokens stay on it. A CPU has a thread for steps, each of which reads
the tokens of the previous one:

    engine   launch N+1 │ tokens of N, messages, commands │ launch N+2 │ ...
    steps    ... step N │ step N+1                                     │ step N+2

`StepThread.launch` creates a step's tensors; only its token ids are filled in when it starts. The engine thus handles
messages while the next step already runs. Sampling parameters may follow while the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from common.engine.models import ForwardBatch, SequenceChunk
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.runner import ModelRunner
from common.engine.sampling import LaunchedTokens, PreparedRows, Sampler, SamplingRow
from common.wire import SampledToken, SamplingParams
from kernels import on_device

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class GraphStep:
    """A launched step, whose rows must be sampled before the next step is launched."""

    def __init__(self, runner: GraphRunner, sampler: Sampler, logits: Tensor) -> None:
        self._runner, self._sampler, self._logits = runner, sampler, logits
        self._tokens: LaunchedTokens | None = None

    def sample(self, rows: Mapping[int, SamplingRow]) -> None:
        """Launch sampling. This is a replay if all rows use only their chunks' parameters."""
        count = len(self._logits)
        with on_device(self._logits.device), torch.inference_mode():
            if not rows:
                self._tokens = LaunchedTokens(self._runner.draw(count), (), self._sampler.vocab_size)
                return
            prepared = self._sampler.prepare([rows.get(row) for row in range(count)])
            self._tokens = self._sampler.launch(self._logits, prepared, self._runner.draws(count))
            self._runner.sampled[:count].copy_(self._tokens.ids)

    def read(self) -> list[SampledToken]:
        """Wait until the step has ended. Raises RuntimeError if it failed or was not sampled."""
        if self._tokens is None:
            self._runner.wait()  # the step still writes to blocks
            raise RuntimeError("the step was not sampled")
        with self._runner.waiting():
            return self._tokens.read()


class StepLauncher:
    """Launcher with a graph runner and a sampler. Steps run in the order of their launches."""

    def __init__(self, runner: GraphRunner, sampler: Sampler) -> None:
        self._runner, self._sampler = runner, sampler

    def takes(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether `launch` can run these chunks, all of which sample."""
        return self._runner.replays(chunks)

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> GraphStep:
        """Start a step. Chunk i runs the token sampled in row `sources[i]` of the previous step, or its own for -1."""
        return GraphStep(self._runner, self._sampler, self._runner.launch(chunks, sources))

    def close(self) -> None:
        """Wait for the launched steps, unless the device has failed."""
        self._runner.finish()


class ThreadStep:
    """A step on the thread. Jobs of `thread` run in the order of their submission."""

    def __init__(self, thread: StepThread, chunks: Sequence[SequenceChunk], logits: Future[Tensor]) -> None:
        self._thread, self._chunks, self._logits = thread, chunks, logits
        self._tokens: Future[list[SampledToken]] | None = None

    def sample(self, rows: Mapping[int, SamplingRow]) -> None:
        """Sample each row after the model has run. The rows' sequences may be modified at once."""
        self._tokens = self._thread.submit_sampling(self._logits, rows_of(self._chunks, rows))

    def read(self) -> list[SampledToken]:
        """Wait for the step. Raises its error, that of the previous step, or RuntimeError if it was not sampled."""
        if self._tokens is None:
            self._logits.result()
            raise RuntimeError("the step was not sampled")
        return self._tokens.result()


class StepThread:
    """Implementation of the decode worker's `Launcher`. No other thread may run the model at the same time."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner, self._sampler = runner, sampler
        self._steps = ThreadPoolExecutor(1, "steps")
        self._last: ThreadStep | None = None

    def takes(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether `launch` can run these chunks: one sampled token each."""
        return all(chunk.sample and len(chunk.token_ids) == 1 for chunk in chunks)

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> ThreadStep:
        """Start a step. Chunk i runs the token that row `sources[i]` of the previous step sampled, or its own for -1.

        Uses torch's number of threads at the time of the call. Raises the errors of `ModelRunner.prepare`.
        """
        batch = self._runner.prepare(chunks)
        before = self._last if max(sources) >= 0 else None
        self._last = ThreadStep(
            self, chunks, self._steps.submit(self._run, batch, before, tuple(sources), torch.get_num_threads())
        )
        return self._last

    def submit_sampling(self, logits: Future[Tensor], rows: Sequence[SamplingRow]) -> Future[list[SampledToken]]:
        """Sample rows of a step after its model has run."""
        return self._steps.submit(self._sample, logits, self._sampler.prepare(rows))

    def close(self) -> None:
        """Wait for the launched steps. Afterwards nothing writes to their blocks."""
        self._steps.shutdown()

    def _run(self, batch: ForwardBatch, before: ThreadStep | None, sources: Sequence[int], num_threads: int) -> Tensor:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if before is not None:
            token_ids, fed = batch.token_ids.numpy(), [token.token_id for token in before.read()]
            for row, source in enumerate(sources):
                if source >= 0:
                    # An id outside of the vocabulary marks logits that are not finite: the engine fails the request.
                    token_ids[row] = fed[source] if fed[source] < self._sampler.vocab_size else 0
        return self._runner.run(batch)

    def _sample(self, logits: Future[Tensor], prepared: PreparedRows) -> list[SampledToken]:
        return self._sampler.launch(logits.result(), prepared).read()


def rows_of(chunks: Sequence[SequenceChunk], rows: Mapping[int, SamplingRow]) -> list[SamplingRow]:
    """Return how each row is sampled: as in `rows`, or with its chunk's parameters."""
    return [rows.get(row) or SamplingRow(chunk.params or GREEDY, chunk.start + 1) for row, chunk in enumerate(chunks)]
