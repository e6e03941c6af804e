"""Runs chunks of sequences through a model, for prefill and decode workers. A decode step has chunks of one token."""

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
    """Interface of a model that the runner uses."""

    config: ModelConfig

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def quantization(self) -> str:
        """A value of `Quantization`."""

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the batch's KV into `kv` and return logits float32 [num sampled rows, vocab_size]."""


@dataclass(slots=True)
class StepProfile:
    """Size and duration of the last `forward`."""

    num_tokens: int = 0
    num_sequences: int = 0
    prepare_s: float = 0.0
    forward_s: float = 0.0


class ModelRunner:
    """Runs a model over a KV cache. Has no other state: equal chunks on equal blocks give equal logits."""

    def __init__(self, model: RunnableModel, kv: KVCache) -> None:
        if kv.dtype not in (model.dtype, *SMALL_DTYPES.values()):
            raise ModelError(f"invalid KV cache type {kv.dtype}: must be the model's {model.dtype} or an 8-bit type")
        self.model, self.kv = model, kv
        self.profile = StepProfile()

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Run all chunks: logits float32 [rows, vocab_size], a row for each chunk with `sample`.

        A chunk with `all_logits` has a row for each token. KV is in a chunk's blocks after this and, on a GPU, `wait`
        have returned. Before anything is written, raises BlockError for a block table that is too short or has an
        invalid block, and InvalidRequest for an invalid token id or position.
        """
        began = time.perf_counter()
        batch = self.prepare(chunks)
        prepared = time.perf_counter()
        logits = self.run(batch)
        done = time.perf_counter()  # on a GPU, kernels are launched but not complete
        self.profile = StepProfile(batch.num_tokens, len(chunks), prepared - began, done - prepared)
        return logits

    def prepare(self, chunks: Sequence[SequenceChunk]) -> ForwardBatch:
        """First half of `forward`, which accesses neither blocks nor model. Raises the same errors."""
        with on_device(self.kv.device), torch.inference_mode():
            return ForwardBatch.build(chunks, self.model.config, self.kv)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Second half of `forward`. Not thread-safe."""
        with on_device(self.kv.device), torch.inference_mode():
            return self.model.forward(batch, self.kv)

    def waiting(self) -> AbstractContextManager[object]:
        """Return the context in which a caller waits for launched steps."""
        return nullcontext()

    def wait(self) -> None:
        """Wait for all launched work. Afterwards others may read and write the blocks of its chunks."""
        if self.kv.device.type == "cuda":
            torch.cuda.current_stream(self.kv.device).synchronize()

    def finish(self) -> None:
        """Like `wait`, but ignores a failed device. Afterwards nothing writes to blocks."""
        if problem := self.device_failure():  # raising would keep the KV threads, and with them the process, alive
            log.warning("device %s", problem)

    def device_failure(self) -> str:
        """Wait for all launched work. Returns "DEVICE failed: REASON" if the device has failed, otherwise "".

        Errors of kernels and of the device last until the process ends. Others, such as too little memory, do not.
        """
        try:
            self.wait()
        except RuntimeError as error:
            return f"{self.kv.device} failed: {str(error).splitlines()[0]}"
        return ""
