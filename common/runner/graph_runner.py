"""Runs decode rows as recorded graphs, one for each of a few batch sizes; everything else as `ModelRunner` does.

A step's inputs go to memory that the graph reads. Rows that pad it to its size have slot -1, so no KV is written, and
no span, so attention skips them; their logits are dropped. A row may take its token from the step before on the device,
so `launch` does not wait for tokens that are still being sampled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.errors import InvalidRequest
from common.kv.cache import KVCache
from common.kv.window import Window
from common.model.batch import NO_PLACE, ForwardBatch, HiddenRows, SequenceChunk, check_chunk
from common.runner.buckets import bucket_for, bucket_sizes
from common.runner.graph_capture import StepRecorder
from common.runner.runner import ModelRunner, RunnableModel, StepProfile
from kernels import NO_ADAPTER, QuerySpan, on_device
from kernels.gpu.device_plan import GPUPlan, Staging

log = logging.getLogger(__name__)

TOKEN, POSITION, SLOT, SOURCE, ADAPTER, BEFORE, KEPT = range(7)  # rows of a step's inputs
NUM_INPUTS = 7
FROM_HOST = -1
"""The source of a row whose token comes from the host; others name a row of the step before."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A decode step of `size` rows. A replay reads `inputs` int64 [NUM_INPUTS, size] and `plan`."""

    size: int
    inputs: Tensor
    plan: GPUPlan
    replay: Callable[[], None]


class GraphRunner(ModelRunner):
    """A `ModelRunner` whose steps of one sampled token a sequence are replays, up to `max_num_seqs` of them."""

    def __init__(
        self,
        model: RunnableModel,
        kv: KVCache,
        recorder: StepRecorder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        adapts: bool = False,
    ) -> None:
        """Records every step, largest first: takes seconds on a GPU, and memory for one step of the largest size.

        With `adapts` it records each step once more, with what adapters add: steps without any do not pay for them.
        """
        super().__init__(model, kv)
        longest = Window(model.config.window, kv.block_size).longest(kv.num_blocks, max_model_len)
        self._max_blocks = -(-longest // kv.block_size)
        self._sizes = bucket_sizes(max_num_seqs)
        largest = self._sizes[-1]
        with torch.inference_mode():
            self._memory = torch.zeros(NUM_INPUTS * largest, dtype=torch.int64, device=kv.device)
            self._staging = Staging(self._memory, copies=2)
            self.logits = torch.zeros(largest, model.config.vocab_size, dtype=torch.float32, device=kv.device)
            self.sampled = torch.zeros(largest, dtype=torch.int64, device=kv.device)
            began = time.perf_counter()
            self._steps = {
                (size, adapted): self._record(size, recorder, adapted=adapted)
                for size in reversed(self._sizes)
                for adapted in ((True, False) if adapts else (False,))
            }
        log.info("recorded %d decode steps in %.1f s", len(self._steps), time.perf_counter() - began)

    @property
    def max_num_seqs(self) -> int:
        return self._sizes[-1]

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """As `ModelRunner.forward`; the logits of a replayed step are overwritten by the next one.

        Beside prompts, rows are replayed all the same, and so get the logits that they get without them.
        """
        if self.replays(chunks):
            return self.launch(chunks, [FROM_HOST] * len(chunks))
        recorded = [self._is_row(chunk) for chunk in chunks]
        rows = [chunk for chunk, is_row in zip(chunks, recorded, strict=True) if is_row]
        if len(rows) == len(chunks) or not self.replays(rows):
            return super().forward(chunks)
        batch = self.prepare([chunk for chunk, is_row in zip(chunks, recorded, strict=True) if not is_row])
        of_rows = self.launch(rows, [FROM_HOST] * len(rows))
        profile, began = self.profile, time.perf_counter()
        with torch.inference_mode():
            logits = _in_order(chunks, recorded, of_rows, self.run(batch))
        seconds = profile.forward_s + time.perf_counter() - began
        self.profile = StepProfile(len(rows) + batch.num_tokens, len(chunks), profile.prepare_s, seconds)
        return logits

    def replays(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether a recorded step can run `chunks`."""
        size = bucket_for(self._sizes, len(chunks))
        if size is None or not all(map(self._is_row, chunks)):
            return False
        return self._steps[size, False].plan.takes(chunk.start + 1 for chunk in chunks)

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> Tensor:
        """Replay a step of `chunks`, which `replays` them: logits float32 [len(chunks), vocab_size], when it has run.

        Row i runs token `self.sampled[sources[i]]` instead of its chunk's own unless that is FROM_HOST; `sampled`,
        int64 [max_num_seqs], is the caller's to write after each step. The logits are the first rows of `self.logits`.
        Errors as `forward`, before anything runs.
        """
        began = time.perf_counter()
        size = bucket_for(self._sizes, len(chunks))
        if size is None:
            raise InvalidRequest(f"{len(chunks)} sequences do not fit a step of {self._sizes[-1]}")
        for chunk in chunks:
            check_chunk(chunk, self.model.config, self.kv)
        with on_device(self.kv.device), torch.inference_mode():
            step = self._steps[size, any(chunk.adapter != NO_ADAPTER for chunk in chunks)]
            host = self._staging.next()[: NUM_INPUTS * size].reshape(NUM_INPUTS, size)
            _write_inputs(host, chunks, sources, self.kv.block_size, self.model.config.vocab_size)
            self._staging.send(NUM_INPUTS * size)
            step.plan.fill([QuerySpan(i, 1, chunk.start, chunk.block_table) for i, chunk in enumerate(chunks)])
            prepared = time.perf_counter()
            step.replay()
        done = time.perf_counter()
        self.profile = StepProfile(len(chunks), len(chunks), prepared - began, done - prepared)
        return self.logits[: len(chunks)]

    def _is_row(self, chunk: SequenceChunk) -> bool:
        """Whether a chunk fits into a recorded step: one sampled token."""
        is_single = chunk.sample and len(chunk.token_ids) == 1
        return is_single and -(-(chunk.start + 1) // self.kv.block_size) <= self._max_blocks

    def _record(self, size: int, recorder: StepRecorder, *, adapted: bool) -> RecordedStep:
        config, kv = self.model.config, self.kv
        inputs = self._memory[: NUM_INPUTS * size].view(NUM_INPUTS, size)
        inputs.zero_()
        inputs[SLOT], inputs[SOURCE], inputs[ADAPTER] = -1, FROM_HOST, NO_ADAPTER
        inputs[BEFORE] = inputs[KEPT] = NO_PLACE
        plan = GPUPlan.empty(size, self._max_blocks, kv.layout, config.num_heads, kv.device)

        def run() -> None:
            # An id that is no token marks logits that are not finite: the host ends its request later.
            before = self.sampled.index_select(0, inputs[SOURCE].clamp_min(0)).clamp(0, config.vocab_size - 1)
            token_ids = torch.where(inputs[SOURCE] < 0, inputs[TOKEN], before)
            plan.prepare()
            adapters = inputs[ADAPTER] if adapted else None
            hidden = HiddenRows(inputs[BEFORE], inputs[KEPT]) if config.draft_head else None
            batch = ForwardBatch(size, token_ids, inputs[POSITION], inputs[SLOT], None, plan, adapters, hidden)
            self.logits[:size].copy_(self.model.forward(batch, kv))

        return RecordedStep(size, inputs, plan, recorder.record(run))


def _in_order(chunks: Sequence[SequenceChunk], recorded: Sequence[bool], rows: Tensor, others: Tensor) -> Tensor:
    """The logits of `chunks` in turn, of which those of `recorded` ones are `rows`."""
    pieces: list[Tensor] = []
    taken = {True: 0, False: 0}
    for is_row, group in groupby(zip(recorded, chunks, strict=True), lambda pair: pair[0]):
        count = sum(len(chunk.token_ids) if chunk.all_logits else chunk.sample for _, chunk in group)
        first, taken[is_row] = taken[is_row], taken[is_row] + count
        pieces.append((rows if is_row else others)[first : first + count])
    return torch.cat(pieces)


def _write_inputs(
    host: npt.NDArray[np.int64],
    chunks: Sequence[SequenceChunk],
    sources: Sequence[int],
    block_size: int,
    vocab_size: int,
) -> None:
    """Fill inputs [NUM_INPUTS, size], behind `chunks` with padding. InvalidRequest for an id that is no token."""
    count = len(chunks)
    for i, chunk in enumerate(chunks):
        token_id, start = chunk.token_ids[0], chunk.start
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"token id {token_id} is outside of the vocabulary of {vocab_size}")
        slot = chunk.block_table[start // block_size] * block_size + start % block_size
        before = chunk.before if i else max(chunk.before, NO_PLACE)  # no row is before the first
        host[:, i] = (token_id, start, slot, sources[i], chunk.adapter, before, chunk.kept)
    host[:, count:] = np.array([[0], [0], [-1], [FROM_HOST], [NO_ADAPTER], [NO_PLACE], [NO_PLACE]])
