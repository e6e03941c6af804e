"""How much memory of the host a worker's steps copy through, pinned before the first of them."""

from __future__ import annotations

import logging

import torch

from common.engine.run.largest_steps import LargestSteps
from common.engine.sampling import max_prompt_logprobs
from common.model_files import ModelConfig
from common.wire import MAX_TOP_LOGPROBS
from kernels.interface import PIECE_ALIGN_BYTES, TABLE, pinned

log = logging.getLogger(__name__)
STEPS = 3
"""At once: one runs, one is launched behind it, and the host still reads what the one before has made."""
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
