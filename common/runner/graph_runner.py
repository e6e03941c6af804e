"""Runs decode rows as recorded graphs, one for each of a few batch sizes; everything else as `ModelRunner` does.

Each sequence has a seat on the device, from which a step reads what it runs (`seats.py`); the step before leaves its
token and its position there, so `launch` does not wait for tokens that are still being sampled, and sends only what has
changed. Rows that pad a step to its size have slot -1, so no KV is written, and no span, so attention skips them; their
logits are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from common.errors import InvalidRequest
from common.kv.cache import KVCache
from common.kv.window import Window
from common.model.batch import ForwardBatch, SequenceChunk
from common.runner.buckets import bucket_for, bucket_sizes
from common.runner.graph_capture import StepRecorder
from common.runner.hidden_inputs import HiddenInputs
from common.runner.runner import ModelRunner, RunnableModel, StepProfile
from common.runner.seats import FROM_HOST, Seats
from kernels import SamplingTensors, on_device, sample
from kernels.gpu.device_plan import GPUPlan
from kernels.gpu.seats import fill_rows
from kernels.interface.seats import (
    NUM_NARROW,
    NUM_WIDE,
    RUN_ADAPTER,
    RUN_POSITION,
    RUN_SLOT,
    RUN_TOKEN,
    SeatLayout,
    StepRows,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A decode step of `size` rows. `replay` fills `rows` and `plan` from the seats, and runs the model on them; `draw`
    samples a token for each row as its sequence's parameters say."""

    size: int
    rows: StepRows
    plan: GPUPlan
    replay: Callable[[], None]
    draw: Callable[[], None]


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
        self._sizes, self._adapts = bucket_sizes(max_num_seqs), adapts
        largest = self._sizes[-1]
        with torch.inference_mode():
            self._seats = Seats(SeatLayout(largest, self._max_blocks, kv.block_size), model.config, kv)
            self._wide = torch.zeros(NUM_WIDE * largest, dtype=torch.int64, device=kv.device)
            self._narrow = torch.zeros(NUM_NARROW * largest, dtype=torch.int32, device=kv.device)
            self.logits = torch.zeros(largest, model.config.vocab_size, dtype=torch.float32, device=kv.device)
            self.sampled = torch.zeros(largest, dtype=torch.int64, device=kv.device)
            self._hidden = HiddenInputs(largest, kv.device) if model.config.draft_head else None
            began = time.perf_counter()
            self._steps = {
                (size, adapted): self._record(size, recorder, adapted=adapted)
                for size in reversed(self._sizes)
                for adapted in ((True, False) if adapts else (False,))
            }
        self._last = self._steps[largest, False]
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
        if size is None or not all(chunk.sample and len(chunk.token_ids) == 1 for chunk in chunks):
            return False
        lengths = [chunk.start + 1 for chunk in chunks]
        return max(lengths) <= self._max_blocks * self.kv.block_size and self._steps[size, False].plan.takes(lengths)

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> Tensor:
        """Replay a step of `chunks`, which `replays` them: logits float32 [len(chunks), vocab_size], when it has run.

        Row i goes on from row `sources[i]` of the step before, whose token it runs, unless that is FROM_HOST: the
        caller has written it to `sampled`, int64 [max_num_seqs], or `draw` has. The logits are the first rows of
        `self.logits`. Errors as `forward`, before anything runs.
        """
        began = time.perf_counter()
        size = bucket_for(self._sizes, len(chunks))
        if size is None:
            raise InvalidRequest(f"{len(chunks)} sequences do not fit a step of {self._sizes[-1]}")
        plan = self._steps[size, False].plan
        if not plan.takes([chunk.start + 1 for chunk in chunks]):
            raise InvalidRequest(f"{len(chunks)} sequences have more than {plan.num_places} partial results together")
        with on_device(self.kv.device), torch.inference_mode():
            self._seats.take(chunks, sources)
            if self._hidden is not None:
                self._hidden.send(chunks, size)
            self._last = self._steps[size, self._adapts and self._seats.has_adapters]
            prepared = time.perf_counter()
            try:
                self._last.replay()
            except BaseException:
                self._seats.forget()
                raise
        done = time.perf_counter()
        self.profile = StepProfile(len(chunks), len(chunks), prepared - began, done - prepared)
        return self.logits[: len(chunks)]

    def draw(self, count: int) -> Tensor:
        """Sample the `count` rows of the last step as their sequences' parameters say: int64 [count] of `sampled`."""
        self._last.draw()
        return self.sampled[:count]

    def draws(self, count: int) -> SamplingTensors:
        """How they draw, for a caller that samples itself, until the next step is launched."""
        return self._last.rows.draws(count, searches=self._seats.searches)

    def check_integrity(self) -> None:
        """Waits for the last step. BlockError unless the device has what the host thinks (`Seats`)."""
        self._seats.check_integrity()

    def _is_row(self, chunk: SequenceChunk) -> bool:
        """Whether a chunk fits into a recorded step: one sampled token."""
        is_single = chunk.sample and len(chunk.token_ids) == 1
        return is_single and -(-(chunk.start + 1) // self.kv.block_size) <= self._max_blocks

    def _record(self, size: int, recorder: StepRecorder, *, adapted: bool) -> RecordedStep:
        config, kv, seats = self.model.config, self.kv, self._seats
        plan = GPUPlan.empty(size, self._max_blocks, kv.layout, config.num_heads, kv.device)
        rows = StepRows.within(self._wide, self._narrow, size, plan.spans, plan.block_tables)

        def run() -> None:
            fill_rows(seats.memory, seats.layout, self.sampled, config.vocab_size, rows)
            plan.prepare()
            adapters = rows.wide[RUN_ADAPTER] if adapted else None
            numbers = rows.wide[RUN_TOKEN], rows.wide[RUN_POSITION], rows.wide[RUN_SLOT]
            hidden = self._hidden.rows(size) if self._hidden is not None else None
            batch = ForwardBatch(size, *numbers, None, plan, adapters, hidden)
            self.logits[:size].copy_(self.model.forward(batch, kv))

        def draw() -> None:
            self.sampled[:size].copy_(sample(self.logits[:size], rows.draws(size)))

        return RecordedStep(size, rows, plan, recorder.record(run), recorder.record(draw))


def _in_order(chunks: Sequence[SequenceChunk], recorded: Sequence[bool], rows: Tensor, others: Tensor) -> Tensor:
    """The logits of `chunks` in turn, of which those of `recorded` ones are `rows`."""
    pieces: list[Tensor] = []
    taken = {True: 0, False: 0}
    for is_row, group in groupby(zip(recorded, chunks, strict=True), lambda pair: pair[0]):
        count = sum(len(chunk.token_ids) if chunk.all_logits else chunk.sample for _, chunk in group)
        first, taken[is_row] = taken[is_row], taken[is_row] + count
        pieces.append((rows if is_row else others)[first : first + count])
    return torch.cat(pieces)
