"""Recorded decode steps on a device: seats, a recording per batch size bucket, tokens, logits.

Works on rows, not sequences. A launch contains all inputs from the host (`StepLaunch`), so all ranks with the same
launches run the same steps. Rows that pad a step to its size have slot -1 (no KV is written) and no span (attention
skips them); their logits are dropped.

Launching the few hundred kernels of a decode step individually takes longer than small batches compute, so a GPU
records each step as a CUDA graph. No other file uses that API.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.engine.kv import KVCache
from common.engine.models import NO_SLOT, ForwardBatch, HiddenRows, SequenceChunk
from common.engine.run.runner import RunnableModel
from common.engine.run.seats import NO_SEAT, SeatChanges
from kernels import SamplingTensors, StepPlan, fill_rows, on_device, sample, step_plan, to_device
from kernels.interface import (
    NUM_NARROW,
    NUM_WIDE,
    RUN_ADAPTER,
    RUN_POSITION,
    RUN_SLOT,
    RUN_TOKEN,
    SeatLayout,
    StepRows,
    fill_device,
)

log = logging.getLogger(__name__)
Broadcast = Callable[[Tensor], None]
"""Broadcasts the numbers of rank 0 in this tensor to all ranks, in place."""
FINE_STEP, COARSE_STEP, FINE_UP_TO = 8, 64, 256
"""Bucket spacing in rows. With 8, at most 7 rows are padding; above 256, padding with 64 is less than a quarter."""
WARMUPS = 2
"""Runs before recording: kernels compile, libraries allocate workspaces, plans build their work lists."""


class StepRecorder(Protocol):
    """Recorder of work that can be replayed."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays `run` on the same memory, with its current values.

        Calls `run` a few times; it must not read values on the host.
        """


class GraphRecorder:
    """CUDA graphs that share one memory pool. Record the largest first, so that the others fit in its memory.

    Replays must be sequential on one stream. Other graphs overwrite the tensors that `run` allocates, so `run` must
    copy results to memory allocated outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                for _ in range(WARMUPS):
                    run()
            outside.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls: NCCL queries CUDA at the same time (pytorch 104487, 110665).
            recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            # `outside` again, because a failed recording leaves its own stream current.
            with collection_paused(), torch.cuda.stream(outside), recording:
                run()
        return graph.replay  # the bound method keeps the graph alive


class PlainRecorder:
    """Replays by calling the function again: for devices without graphs, and for tests."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def recorder_for(device: torch.device) -> StepRecorder:
    """Return the recorder of a device."""
    return GraphRecorder(device) if device.type == "cuda" else PlainRecorder()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection: freeing a graph or pinned memory would invalidate a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, 24, 32, ... and `max_num_seqs`, ascending, with wider steps for larger sizes."""
    sizes = {1, 2, 4, *range(FINE_STEP, FINE_UP_TO + 1, FINE_STEP)}
    sizes |= set(range(FINE_UP_TO, max_num_seqs, COARSE_STEP))
    return (*sorted(size for size in sizes if size < max_num_seqs), max_num_seqs)


def bucket_for(sizes: Sequence[int], count: int) -> int | None:
    """Return the smallest of the ascending `sizes` that fits `count` rows, or None if none does or `count` is 0."""
    index = bisect_left(sizes, count)
    return sizes[index] if count > 0 and index < len(sizes) else None


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of recorded steps, equal on all ranks. With `adapts`, each step is also recorded with adapters."""

    max_num_seqs: int
    max_blocks: int
    adapts: bool = False

    @property
    def buckets(self) -> tuple[int, ...]:
        return bucket_sizes(self.max_num_seqs)

    def layout(self, block_size: int) -> SeatLayout:
        return SeatLayout(self.max_num_seqs, self.max_blocks, block_size)


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """Order to apply `changes` to the seats, then replay the recording of `size` rows, with adapters if `adapted`."""

    size: int
    adapted: bool
    changes: SeatChanges


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step.

    `replay` fills `rows` and `plan` from the seats and runs the model. `draw` samples each row with its parameters, on
    a rank that samples.
    """

    rows: StepRows
    plan: StepPlan
    replay: Callable[[], None]
    draw: Callable[[], None] | None


class HiddenInputs:
    """Slots from which rows read the hidden states of a draft head's input, and to which they write their own.

    Device memory for steps of up to `most_rows` rows, with one copy per step before its replay.
    """

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self._memory = torch.full((2 * most_rows,), NO_SLOT, dtype=torch.int64, device=device)

    def rows(self, size: int, count: int) -> HiddenRows:
        """Return the slots of the first `count` rows of a step of `size` rows."""
        before, kept = self._memory[: 2 * size].view(2, size)[:, :count]
        return HiddenRows(before, kept)

    def send(self, chunks: Sequence[SequenceChunk], size: int) -> None:
        """Copy the slots of `chunks`, one row each, and of the rows that pad the step to `size`."""

        def write(numbers: np.ndarray) -> None:
            rows = numbers.reshape(2, size)
            rows[:, : len(chunks)] = np.array([[chunk.before, chunk.kept] for chunk in chunks]).T
            rows[0, 0] = max(rows[0, 0], NO_SLOT)  # the first row has no row before it
            rows[:, len(chunks) :] = NO_SLOT

        fill_device(self._memory, 2 * size, write)


class RecordedSteps:
    """All recorded steps of a device. Not thread-safe: use only from the thread that launches steps."""

    def __init__(
        self,
        model: RunnableModel,
        kv: KVCache,
        recorder: StepRecorder,
        sizes: StepSizes,
        *,
        spread: Broadcast | None = None,
        samples: bool = True,
    ) -> None:
        """Record all steps, largest first. Takes seconds on a GPU, and memory for one step of the largest size.

        With `spread`, all ranks must record at the same time. Without `samples`, there are no logits or draws.
        """
        self._model, self._kv, self._spread, self._samples = model, kv, spread, samples
        self._layout, largest = sizes.layout(kv.block_size), sizes.max_num_seqs
        vocab_size = model.config.vocab_size if samples else 0
        with torch.inference_mode():
            self.seats = torch.zeros(self._layout.num_words, dtype=torch.int64, device=kv.device)
            self.seats[:largest].fill_(NO_SEAT)
            self._wide = torch.zeros(NUM_WIDE * largest, dtype=torch.int64, device=kv.device)
            self._narrow = torch.zeros(NUM_NARROW * largest, dtype=torch.int32, device=kv.device)
            self.logits = torch.zeros(largest, vocab_size, dtype=torch.float32, device=kv.device)
            self.sampled = torch.zeros(largest, dtype=torch.int64, device=kv.device)
            self.hidden = HiddenInputs(largest, kv.device) if model.config.draft_head else None
            began = time.perf_counter()
            self._steps = {
                (size, adapted): self._record(size, recorder, adapted=adapted)
                for size in reversed(sizes.buckets)
                for adapted in ((True, False) if sizes.adapts else (False,))
            }
        self._last = self._steps[largest, False]
        log.info("worker recorded %d decode steps as graphs in %.1f s", len(self._steps), time.perf_counter() - began)

    def plan(self, size: int) -> StepPlan:
        """Return the plan of a recorded step of `size` rows."""
        return self._steps[size, False].plan

    def launch(self, launch: StepLaunch) -> None:
        """Start a step after all earlier launches."""
        with on_device(self._kv.device), torch.inference_mode():
            if len(launch.changes.places):
                where, words = to_device(launch.changes, self._kv.device)
                self.seats.index_copy_(0, where, words)
            self._last = self._steps[launch.size, launch.adapted]
            self._last.replay()

    def draw(self, count: int) -> Tensor:
        """Sample the first `count` rows of the last step with their parameters: int64 [count], a view of `sampled`."""
        assert self._last.draw is not None, "this rank does not sample"
        self._last.draw()
        return self.sampled[:count]

    def draws(self, count: int, *, searches: bool) -> SamplingTensors:
        """Return the sampling parameters of the last step's rows, valid until the next launch."""
        return self._last.rows.draws(count, searches=searches)

    def _record(self, size: int, recorder: StepRecorder, *, adapted: bool) -> RecordedStep:
        config, kv = self._model.config, self._kv
        plan = step_plan(size, self._layout.width, kv.layout, config.num_heads, kv.device)
        rows = StepRows.within(self._wide, self._narrow, size, plan.spans, plan.block_tables)

        def run() -> None:
            if self._spread is not None:  # sampled on rank 0
                self._spread(self.sampled)
            fill_rows(self.seats, self._layout, self.sampled, config.vocab_size, rows)
            attention = plan.prepare()
            if count := plan.num_rows:
                adapters = rows.wide[RUN_ADAPTER, :count] if adapted else None
                token_ids, positions, slots = (rows.wide[row, :count] for row in (RUN_TOKEN, RUN_POSITION, RUN_SLOT))
                hidden = self.hidden.rows(size, count) if self.hidden is not None else None
                batch = ForwardBatch(count, token_ids, positions, slots, None, attention, adapters, hidden)
                logits = self._model.forward(batch, kv)
                if self._samples:
                    self.logits[:count].copy_(logits)

        def draw() -> None:
            self.sampled[:size].copy_(sample(self.logits[:size], rows.draws(size)))

        return RecordedStep(rows, plan, recorder.record(run), recorder.record(draw) if self._samples else None)
