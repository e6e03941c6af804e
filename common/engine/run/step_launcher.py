"""Launches whole decode steps, model and sampling, without waiting for the tokens: they stay on the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from common.engine.models import SequenceChunk
from common.engine.run.graph_runner import GraphRunner
from common.engine.sampling import LaunchedTokens, Sampler, SamplingRow
from common.wire import SampledToken
from kernels import on_device

log = logging.getLogger(__name__)


class GraphStep:
    """A step whose model runs, and whose rows are to be sampled before the next step is launched."""

    def __init__(self, runner: GraphRunner, sampler: Sampler, logits: Tensor) -> None:
        self._runner, self._sampler, self._logits = runner, sampler, logits
        self._tokens: LaunchedTokens | None = None

    def sample(self, rows: Mapping[int, SamplingRow]) -> None:
        """Launches the sampling of each row: a replay, if all rows sample by their chunks' parameters alone."""
        count = len(self._logits)
        with on_device(self._logits.device), torch.inference_mode():
            if not rows:
                self._tokens = LaunchedTokens(self._runner.draw(count), (), self._sampler.vocab_size)
                return
            prepared = self._sampler.prepare([rows.get(row) for row in range(count)])
            self._tokens = self._sampler.launch(self._logits, prepared, self._runner.draws(count))
            self._runner.sampled[:count].copy_(self._tokens.ids)

    def read(self) -> list[SampledToken]:
        """Waits until the step has ended. Raises RuntimeError when it failed, or nothing was sampled."""
        if self._tokens is None:
            self._runner.wait()  # it still writes to blocks
            raise RuntimeError("its rows were not sampled")
        with self._runner.waiting():
            return self._tokens.read()


class StepLauncher:
    """A graph runner and a sampler. Steps run on the device in the order in which they are launched."""

    def __init__(self, runner: GraphRunner, sampler: Sampler) -> None:
        self._runner, self._sampler = runner, sampler

    def takes(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether `launch` can run these chunks, each of which samples."""
        return self._runner.replays(chunks)

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> GraphStep:
        """Starts a step. Chunk i runs the token that row `sources[i]` of the step before sampled, or its own for -1."""
        return GraphStep(self._runner, self._sampler, self._runner.launch(chunks, sources))

    def close(self) -> None:
        """Waits for the launched steps, unless the device has failed."""
        try:
            self._runner.wait()
        except RuntimeError as error:  # raised, it would keep the KV threads and so the process alive
            log.warning("the device failed: %s", str(error).splitlines()[0])
