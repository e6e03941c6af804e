"""Runs the steps of rank 0: each is sent to the other ranks as one message, right before rank 0 computes its part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from common.kv.cache import KVCache
from common.model.batch import ForwardBatch, SequenceChunk
from common.ranks.processes import RankProcesses
from common.ranks.step_message import Numbers, pack_step, token_ids_of
from common.runner.runner import ModelRunner, RunnableModel
from kernels import on_device


@dataclass(frozen=True, slots=True)
class RankedBatch(ForwardBatch):
    """A step, and the message of it. Its token ids may still change before it runs."""

    message: Numbers = field(default_factory=lambda: np.empty(0, np.int32))


class RankedRunner(ModelRunner):
    """A `ModelRunner` whose steps the other ranks run at the same time. After an error no step can follow."""

    def __init__(self, model: RunnableModel, kv: KVCache, others: RankProcesses) -> None:
        super().__init__(model, kv)
        self._others = others

    def prepare(self, chunks: Sequence[SequenceChunk]) -> ForwardBatch:
        with on_device(self.kv.device), torch.inference_mode():
            batch = RankedBatch.build(chunks, self.model.config, self.kv)
            assert isinstance(batch, RankedBatch)  # mypy takes a class method for its base's
            return replace(batch, message=pack_step(chunks, self.kv.block_size))

    def run(self, batch: ForwardBatch) -> Tensor:
        """Raises RankLost, after which no step can run, whatever the reason was."""
        assert isinstance(batch, RankedBatch)  # made by `prepare`
        token_ids_of(batch.message)[:] = batch.token_ids.numpy(force=True)
        with self._others.in_step():
            self._others.send_step(batch.message)
            return super().run(batch)
