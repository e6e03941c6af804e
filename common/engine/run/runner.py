"""Runs chunks of sequences through a model, for prefill and decode workers alike: a decode step is a chunk of one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.kv import SMALL_DTYPES, KVCache
from common.engine.models import ForwardBatch, SequenceChunk
from common.errors import ModelError
from common.model_files import ModelConfig
from kernels import on_device

log = logging.getLogger(__name__)


class RunnableModel(Protocol):
    """What the runner uses of a model."""

    config: ModelConfig

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def quantization(self) -> str:
        """One of `Quantization`."""

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the batch's KV into `kv` and return logits float32 [num sampled rows, vocab_size]."""


@dataclass(slots=True)
class StepProfile:
    """The size and duration of the last `forward`."""

    num_tokens: int = 0
    num_sequences: int = 0
    prepare_s: float = 0.0
    forward_s: float = 0.0


class ModelRunner:
    """Owns no state but the model and the KV cache: the same chunks on the same blocks give the same logits."""

    def __init__(self, model: RunnableModel, kv: KVCache) -> None:
        if kv.dtype not in (model.dtype, *SMALL_DTYPES.values()):
            raise ModelError(f"a KV cache of {kv.dtype} is neither of the model's {model.dtype} nor of 8 bits")
        self.model, self.kv = model, kv
        self.profile = StepProfile()

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Runs every chunk: logits float32 [rows, vocab_size], a row for each chunk with `sample`.

        A chunk with `all_logits` has a row for each token.

        A chunk's KV is in its blocks once this and, on a GPU, `wait` have returned. Before it writes anything it raises
        BlockError when a block table is too short or names a block out of range, InvalidRequest when a token id or
        position is out of range.
        """
        began = time.perf_counter()
        batch = self.prepare(chunks)
        prepared = time.perf_counter()
        logits = self.run(batch)
        done = time.perf_counter()  # launching them is done, where the device runs by itself
        self.profile = StepProfile(batch.num_tokens, len(chunks), prepared - began, done - prepared)
        return logits

    def prepare(self, chunks: Sequence[SequenceChunk]) -> ForwardBatch:
        """The first half of `forward`, which touches neither blocks nor model. Errors as there."""
        with on_device(self.kv.device), torch.inference_mode():
            return ForwardBatch.build(chunks, self.model.config, self.kv)

    def run(self, batch: ForwardBatch) -> Tensor:
        """The second half of `forward`, one at a time."""
        with on_device(self.kv.device), torch.inference_mode():
            return self.model.forward(batch, self.kv)

    def waiting(self) -> AbstractContextManager[object]:
        """The context in which a caller waits for launched steps."""
        return nullcontext()

    def wait(self) -> None:
        """Waits for all launched work: afterwards others may read and write the blocks of its chunks."""
        if self.kv.device.type == "cuda":
            torch.cuda.current_stream(self.kv.device).synchronize()

    def finish(self) -> None:
        """As `wait`, unless the device has failed: nothing writes to blocks afterwards."""
        try:
            self.wait()
        except RuntimeError as error:  # raised, it would keep the KV threads and so the process alive
            log.warning("the device failed: %s", str(error).splitlines()[0])
