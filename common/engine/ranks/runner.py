"""Runs the steps of rank 0: each is sent to the other ranks as one message, right before rank 0 computes its part.

RankedRunner         every step kernel by kernel                    chunks ─>
RankedGraphRunner    rows replayed, one recording on every rank     what changes in the seats, which recording ─>
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from common.engine.kv import KVCache
from common.engine.models import ForwardBatch, SequenceChunk
from common.engine.ranks.processes import RankProcesses
from common.engine.ranks.step_message import Numbers, pack_launch, pack_sizes, pack_step, token_ids_of
from common.engine.ranks.wait_deadline import WaitDeadline
from common.engine.run import (
    GraphRunner,
    ModelRunner,
    RecordedSteps,
    RunnableModel,
    Spread,
    StepLaunch,
    StepRecorder,
    StepSizes,
)
from common.model_files import ModelConfig
from kernels import on_device


@dataclass(frozen=True, slots=True)
class RankedBatch(ForwardBatch):
    """A step, and the message of it. On a CPU its token ids may still change before it runs."""

    message: Numbers = field(default_factory=lambda: np.empty(0, np.int32))

    @classmethod
    def of(cls, chunks: Sequence[SequenceChunk], config: ModelConfig, kv: KVCache) -> RankedBatch:
        """Errors as `ForwardBatch.build`."""
        with on_device(kv.device), torch.inference_mode():
            batch = cls.build(chunks, config, kv)
            assert isinstance(batch, cls)  # mypy takes a class method for its base's
            return replace(batch, message=pack_step(chunks, kv.block_size))

    def send(self, others: RankProcesses) -> None:
        """Have the other ranks run it. Raises RankLost."""
        if self.token_ids.device.type == "cpu":
            token_ids_of(self.message)[:] = self.token_ids.numpy()
        others.send_step(self.message)


class StepsOfAllRanks(ModelRunner):
    """Chunks that the other ranks run at the same time. A wait for launched steps has a `_deadline`.

    After an error no step can follow.
    """

    _others: RankProcesses
    _deadline: WaitDeadline

    def prepare(self, chunks: Sequence[SequenceChunk]) -> ForwardBatch:
        return RankedBatch.of(chunks, self.model.config, self.kv)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Raises RankLost, after which no step can run, whatever the reason was."""
        assert isinstance(batch, RankedBatch)  # made by `prepare`
        with self._others.in_step():
            batch.send(self._others)
            return super().run(batch)

    def wait(self) -> None:
        with self._deadline.wait():
            super().wait()

    def waiting(self) -> AbstractContextManager[object]:
        return self._deadline.wait()


class RankedRunner(StepsOfAllRanks):
    """Every step kernel by kernel."""

    def __init__(self, model: RunnableModel, kv: KVCache, others: RankProcesses, deadline: WaitDeadline) -> None:
        super().__init__(model, kv)
        self._others, self._deadline = others, deadline


class RankedGraphRunner(StepsOfAllRanks, GraphRunner):
    """A `GraphRunner` whose steps the other ranks run at the same time, replayed ones too.

    A replay needs nothing of the host but what changes in the seats, and the tokens that rank 0 has sampled: each
    recording begins with a `spread` of those.
    """

    def __init__(
        self,
        model: RunnableModel,
        kv: KVCache,
        recorder: StepRecorder,
        others: RankProcesses,
        spread: Spread,
        deadline: WaitDeadline,
        *,
        max_num_seqs: int,
        max_model_len: int,
        adapts: bool = False,
    ) -> None:
        """Has all ranks record at the same time. Raises RankLost where another one cannot."""
        self._others, self._spread, self._deadline = others, spread, deadline
        super().__init__(model, kv, recorder, max_num_seqs=max_num_seqs, max_model_len=max_model_len, adapts=adapts)

    def _record(self, recorder: StepRecorder, sizes: StepSizes) -> RecordedSteps:
        self._others.send_step(pack_sizes(sizes))
        return RecordedSteps(self.model, self.kv, recorder, sizes, spread=self._spread)

    def _replay(self, launch: StepLaunch, chunks: Sequence[SequenceChunk]) -> None:
        """Raises RankLost, after which no step can run, whatever the reason was."""
        with self._others.in_step():
            self._others.send_step(pack_launch(launch))
            super()._replay(launch, chunks)
