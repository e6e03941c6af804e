"""Memory that a GPU worker allocates at its start: KV blocks on the device, and pinned host memory for steps.

The number of KV blocks is measured, because no formula covers what kernels allocate:

    load the weights ─> run the largest steps on a small cache ─> use the rest of the worker's share for KV blocks

Ranks of a worker measure together, each on its own device. All get the number of blocks that fits on the smallest.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Protocol

import torch

from common.config import WorkerConfig
from common.engine.kv import KVCache, block_bytes
from common.engine.run.draft_model import DraftPlan
from common.engine.run.memory_need import GIB, LargestSteps
from common.engine.run.runner import ModelRunner, RunnableModel
from common.engine.run.warm_up import run_every_kind
from common.engine.sampling import max_prompt_logprobs
from common.errors import ConfigError
from common.model_files import ModelConfig
from common.wire import MAX_TOP_LOGPROBS
from kernels.interface import PIECE_ALIGN_BYTES, TABLE, pinned

log = logging.getLogger(__name__)
CONTEXT_BYTES = GIB
"""Maximum size of the driver's context, loaded kernels and library workspaces, which torch does not count."""
TRIAL_SHARE = 0.5
"""Share of the free memory for the small cache of the trial steps."""
STEPS = 3
"""Steps that copy at the same time: one runs, one is launched, and the host still reads the results of the last."""
TOKEN_BYTES = 7 * 8 + 8
"""Bytes per token of a step: id, position, slot, row to sample, adapter and two hidden state slots of 8 bytes each
(`ForwardBatch.build`), and at most one tile of query rows."""
DRAW_BYTES = 36
CHANGED_LOGITS, CHANGE_BYTES = 1024, 12
"""Distinct tokens per row with bias or penalties, and bytes per token. Longer answers with penalties may exceed this
and then allocate separately."""
PIECES = 32
"""Copies per step. Each is aligned for any type."""
MAX_BYTES = 64 * 2**20


def alone(number: int) -> int:
    """Agreement of a worker with one rank: its own number."""
    return number


class DeviceMemory(Protocol):
    """Memory of one GPU, as seen by one process."""

    def free_and_total(self) -> tuple[int, int]:
        """Return free and total bytes."""

    def used(self) -> int:
        """Return the bytes that this process has allocated."""

    def peak_of(self, run: Callable[[], None]) -> int:
        """Return the maximum bytes that `run` allocates in addition."""


class CUDAMemory:
    """Implementation of `DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)

    def used(self) -> int:
        return torch.cuda.memory_reserved(self._device) + CONTEXT_BYTES

    def peak_of(self, run: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def blocks_left(
    model: RunnableModel,
    config: WorkerConfig,
    kv_dtype: str,
    memory: DeviceMemory,
    draft: DraftPlan | None = None,
    *,
    samples: bool = True,
    least: Callable[[int], int] = alone,
) -> int:
    """Return the number of blocks that fit in `--gpu-memory-utilization`. Raises ConfigError if fewer than two do.

    A `draft` model is not loaded yet. With other ranks, `least` returns the minimum of all ranks: see `measure`.
    """
    return measure(model, LargestSteps.of(config, samples=samples), kv_dtype, memory, draft, least=least)


def measure(
    model: RunnableModel,
    largest: LargestSteps,
    kv_dtype: str,
    memory: DeviceMemory,
    draft: DraftPlan | None = None,
    *,
    least: Callable[[int], int] = alone,
    draws: bool = True,
) -> int:
    """Return `blocks_left` for one rank. All ranks call this at the same time, with `draws` on those that sample.

    Steps recorded as graphs have separate memory, as much as one of the largest.
    """
    per_block = block_bytes(model.config, largest.block_size, kv_dtype)
    free, total = memory.free_and_total()
    longest = max(model.config.max_model_len, largest.num_tokens)
    num_tried = least(max(2, min(-(-longest // largest.block_size), int(TRIAL_SHARE * free / per_block))))
    try:
        peak = memory.peak_of(lambda: _try_steps(model, largest, kv_dtype, num_tried, draws=draws))
    except torch.OutOfMemoryError as error:
        problem = (
            f"higher, or use smaller steps: a step of {largest.num_tokens} tokens does not fit in the "
            f"{free / GIB:.2f} GiB of {total / GIB:.2f} GiB that are free after loading the weights "
            f"({str(error).splitlines()[0]})"
        )
        raise ConfigError("gpu_memory_utilization", largest.share, problem) from error
    free, total = memory.free_and_total()
    steps = (peak - num_tried * per_block) * (2 if largest.recorded else 1)
    room = min(int(largest.share * total) - memory.used(), free) - steps
    if draft is not None:
        room, per_block = room - draft.weight_bytes, per_block + draft.block_bytes
    own = max(0, room // per_block)
    num_blocks = least(own)
    log.info(
        "memory on %s: %.2f GiB, %.2f GiB free, steps take %.2f GiB, %.2f GiB left for KV: %d blocks fit, %d used",
        *(model.device, total / GIB, free / GIB, steps / GIB, max(0, room) / GIB, own, num_blocks),
    )
    if num_blocks < 2:
        used = f"this worker uses {memory.used() / GIB:.2f} GiB, its steps take {steps / GIB:.2f} GiB"
        allowed = f"higher, or use smaller steps: of {total / GIB:.2f} GiB, {used}, and {free / GIB:.2f} GiB are free"
        if own >= 2:
            allowed = f"higher, or use smaller steps: fewer than 2 KV blocks fit on another rank, {own} fit on this one"
        raise ConfigError("gpu_memory_utilization", largest.share, allowed)
    return num_blocks


def _try_steps(model: RunnableModel, largest: LargestSteps, kv_dtype: str, num_blocks: int, *, draws: bool) -> None:
    """Run the largest steps over a temporary cache."""
    kv = KVCache(model.config, num_blocks, largest.block_size, kv_dtype, str(model.device))
    runner = ModelRunner(model, kv)
    run_every_kind(runner, largest.num_tokens, largest.num_rows, samples=largest.samples, draws=draws)


def step_copy_bytes(largest: LargestSteps, shape: ModelConfig) -> int:
    """Return the pinned memory for `STEPS` of the largest steps, at most `MAX_BYTES`.

    A token takes TOKEN_BYTES. A row takes its span (12 bytes), block table (4 bytes per entry), and seat if steps are
    recorded (pairs of place and word, 16 bytes per word), its sampling parameters, a mask of allowed tokens (a bit
    each), its changed logits, its token (8 bytes) and log probabilities. Log probabilities of prompt tokens are added.
    """
    width = -(-shape.max_model_len // largest.block_size)
    row = 3 * 4 + 4 * width
    if largest.recorded:
        row += 16 * (1 + TABLE + width)
    logprobs = 0
    if largest.samples:
        logprobs = 4 * (2 + 2 * MAX_TOP_LOGPROBS)
        row += DRAW_BYTES + 8 + -(-shape.vocab_size // 8) + CHANGED_LOGITS * CHANGE_BYTES + 8 + logprobs
    step = largest.num_tokens * TOKEN_BYTES + largest.num_rows * row
    step += max_prompt_logprobs(shape.vocab_size) * logprobs + PIECES * PIECE_ALIGN_BYTES
    return min(MAX_BYTES, STEPS * step)


def reserve_step_copies(largest: LargestSteps, shape: ModelConfig, device: torch.device) -> None:
    """Pin the memory for a worker's steps if its device needs it. Call before the first step."""
    if device.type != "cuda":
        return
    pinned().reserve_ring(step_copy_bytes(largest, shape))
    log.info("worker pinned %.1f MiB of host memory for copies of steps", pinned().ring.num_bytes / 2**20)
