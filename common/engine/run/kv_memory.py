"""Memory of a GPU worker that is taken at its start: KV blocks on the device, pinned memory of the host for steps.

How many KV blocks fit beside weights and steps is measured, because no formula knows what kernels allocate.

load the weights ─> try the largest steps on a small cache ─> what is left of this worker's share is for KV blocks

Ranks of a worker try these steps together, each on its own device, and all have as many blocks as fit on the smallest.
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
"""What the driver's context, loaded kernels and libraries' workspaces take at most; torch does not count them."""
TRIAL_SHARE = 0.5
"""The share of the free memory that the small cache of the trial steps may take."""
STEPS = 3
"""Steps that copy at once: one runs, one is launched behind it, and the host still reads what the last one has made."""
TOKEN_BYTES = 7 * 8 + 8
"""What a step says of a token: id, position, slot, row to sample, adapter and two places of hidden states, 8 bytes each
(`ForwardBatch.build`), and at most one tile of query rows."""
DRAW_BYTES = 36
CHANGED_LOGITS, CHANGE_BYTES = 1024, 12
"""Of a row, by bias and penalties: distinct tokens, and the bytes of one. Longer answers with penalties may have more,
which then get memory of their own."""
PIECES = 32
"""In which a step copies; each begins where any type may lie."""
MOST_BYTES = 64 * 2**20


def alone(number: int) -> int:
    """What the ranks of a worker with one rank agree on: its own number."""
    return number


class DeviceMemory(Protocol):
    """The memory of one GPU, as one process sees it."""

    def free_and_total(self) -> tuple[int, int]:
        """Free bytes, and all."""

    def used(self) -> int:
        """Bytes that this process has taken."""

    def peak_of(self, run: Callable[[], None]) -> int:
        """Bytes that `run` takes beyond what is taken before, at most."""


class CUDAMemory:
    """Implements `DeviceMemory`."""

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
    """How many blocks `--gpu-memory-utilization` leaves room for. Raises ConfigError when it is less than two.

    A `draft` model is not loaded yet. With other ranks `least` gives the least of what all say: see `measure`.
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
    """`blocks_left` for one rank. All ranks call this at the same time, with `draws` where logits are.

    Steps that are recorded as graphs have memory of their own, as much as one of the largest.
    """
    per_block = block_bytes(model.config, largest.block_size, kv_dtype)
    free, total = memory.free_and_total()
    longest = max(model.config.max_model_len, largest.num_tokens)
    num_tried = least(max(2, min(-(-longest // largest.block_size), int(TRIAL_SHARE * free / per_block))))
    try:
        peak = memory.peak_of(lambda: _try_steps(model, largest, kv_dtype, num_tried, draws=draws))
    except torch.OutOfMemoryError as error:
        beside = f"smaller steps: of {total / GIB:.2f} GiB {free / GIB:.2f} are free beside the weights, and"
        problem = f"{beside} a step of {largest.num_tokens} tokens does not fit ({str(error).splitlines()[0]})"
        raise ConfigError("gpu_memory_utilization", largest.share, problem) from error
    free, total = memory.free_and_total()
    steps = (peak - num_tried * per_block) * (2 if largest.recorded else 1)
    room = min(int(largest.share * total) - memory.used(), free) - steps
    if draft is not None:
        room, per_block = room - draft.weight_bytes, per_block + draft.block_bytes
    own = max(0, room // per_block)
    num_blocks = least(own)
    log.info(
        "memory of %s: %.2f GiB, %.2f GiB free, steps take %.2f GiB, %.2f GiB are for KV: %d blocks fit, %d are taken",
        *(model.device, total / GIB, free / GIB, steps / GIB, max(0, room) / GIB, own, num_blocks),
    )
    if num_blocks < 2:
        used = f"this worker uses {memory.used() / GIB:.2f} GiB, its steps take {steps / GIB:.2f} GiB"
        allowed = f"more, or smaller steps: of {total / GIB:.2f} GiB {used}, and {free / GIB:.2f} GiB are free"
        if own >= 2:
            allowed = f"more, or smaller steps: another rank has no room for two blocks, and this one for {own}"
        raise ConfigError("gpu_memory_utilization", largest.share, allowed)
    return num_blocks


def _try_steps(model: RunnableModel, largest: LargestSteps, kv_dtype: str, num_blocks: int, *, draws: bool) -> None:
    """The largest steps over a cache of its own."""
    kv = KVCache(model.config, num_blocks, largest.block_size, kv_dtype, str(model.device))
    runner = ModelRunner(model, kv)
    run_every_kind(runner, largest.num_tokens, largest.num_rows, samples=largest.samples, draws=draws)


def step_copy_bytes(largest: LargestSteps, shape: ModelConfig) -> int:
    """For `STEPS` steps of the largest size, rounded up later to a power of two; `MOST_BYTES` at most.

    Of each token TOKEN_BYTES. Of each row: its span (12 bytes) and block table (4 bytes an entry), where steps are
    recorded its seat as pairs of place and word (16 bytes a word), its draw, a mask of allowed tokens (a bit each), its
    changed logits, its token (8 bytes) and log-probabilities. Then those of a prompt's tokens.
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
    return min(MOST_BYTES, STEPS * step)


def reserve_step_copies(largest: LargestSteps, shape: ModelConfig, device: torch.device) -> None:
    """Pins the memory for a worker's steps, where its device needs it pinned; called before the first step."""
    if device.type != "cuda":
        return
    pinned().reserve_ring(step_copy_bytes(largest, shape))
    log.info("pinned %.1f MiB of host memory for what steps copy", pinned().ring.num_bytes / 2**20)
