"""Launches whole decode steps, model and sampling, without waiting for the tokens: they stay on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from common.model.batch import SequenceChunk
from common.runner.graph_runner import GraphRunner
from common.sampling.sampler import Sampler, SamplingRow
from kernels import on_device

log = logging.getLogger(__name__)


class SampledIds:
    """Token ids on their way to the host. The thread that launches the step makes it right after."""

    def __init__(self, ids: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        on_gpu = ids.device.type == "cuda"
        self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=on_gpu)
        self._host.copy_(ids, non_blocking=True)
        if on_gpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[int]:
        """Waits until the step has ended. Raises RuntimeError when it failed on the device."""
        if self._event is not None:
            self._event.synchronize()
        return [int(token_id) for token_id in self._host.tolist()]


class StepLauncher:
    """A graph runner and a sampler. Steps run on the device in the order in which they are launched."""

    def __init__(self, runner: GraphRunner, sampler: Sampler) -> None:
        self._runner, self._sampler = runner, sampler

    def takes(self, chunks: Sequence[SequenceChunk], rows: Sequence[SamplingRow]) -> bool:
        """Whether `launch` can run these chunks, each of which samples by its row."""
        return len(rows) == len(chunks) and self._runner.replays(chunks) and self._sampler.can_launch(rows)

    def launch(
        self, chunks: Sequence[SequenceChunk], sources: Sequence[int], rows: Sequence[SamplingRow]
    ) -> SampledIds:
        """Starts a step. Chunk i runs the token that row `sources[i]` of the step before sampled, or its own for -1."""
        logits = self._runner.launch(chunks, sources)
        with on_device(logits.device), torch.inference_mode():
            ids = self._runner.sampled[: len(chunks)]
            ids.copy_(self._sampler.launch(logits, rows))
            return SampledIds(ids)

    def close(self) -> None:
        """Waits for the launched steps, unless the device has failed."""
        try:
            self._runner.wait()
        except RuntimeError as error:  # raised, it would keep the KV threads and so the process alive
            log.warning("the device failed: %s", str(error).splitlines()[0])
