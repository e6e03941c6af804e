"""How many KV blocks fit beside weights and steps on a GPU: measured, because no formula knows what kernels allocate.

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
from common.engine.run.largest_steps import LargestSteps
from common.engine.run.memory_need import GIB
from common.engine.run.runner import ModelRunner, RunnableModel
from common.engine.run.warm_up import run_every_kind
from common.errors import ConfigError

log = logging.getLogger(__name__)
CONTEXT_BYTES = GIB
"""What the driver's context, loaded kernels and libraries' workspaces take at most; torch does not count them."""
TRIAL_SHARE = 0.5
"""The share of the free memory that the small cache of the trial steps may take."""


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
