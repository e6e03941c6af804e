"""Device-resident decode state: each sequence has a seat of int64 words that persists between steps.

    [seat of each row, -1: padding] [seat 0: fields, block table] [seat 1] ...

For each row, a step reads from the row's seat the token (sampled by the previous step or given by the host), the
position, the block table and the sampling parameters. It then updates the position and the row in the seat, so the host
sends nothing as long as the same sequences continue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.interface.draws import SamplingTensors

POSITION, BEFORE, TOKEN, ADAPTER, SEED, TOP_P, TEMPERATURE, MIN_P, TOP_K, TABLE = range(10)
"""Word offsets in a seat. BEFORE is the row in the previous step whose sampled token is used; -1: use TOKEN.
TOP_P contains the bits of a float64, TEMPERATURE and MIN_P those of a float32. The block table starts at TABLE."""
RUN_TOKEN, RUN_POSITION, RUN_SLOT, RUN_ADAPTER, DRAW_SEED, DRAW_POSITION, DRAW_TOP_P = range(7)
NUM_WIDE = 7
"""Rows of the 64-bit step data."""
DRAW_TEMPERATURE, DRAW_MIN_P, DRAW_TOP_K = range(3)
NUM_NARROW = 3
"""Rows of the 32-bit step data."""


class SeatLayout(NamedTuple):
    """`num_seats` seats, each with a block table of `width` entries for blocks of `block_size` tokens."""

    num_seats: int
    width: int
    block_size: int

    @property
    def seat_words(self) -> int:
        return TABLE + self.width

    @property
    def num_words(self) -> int:
        return self.num_seats * (1 + self.seat_words)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Inputs of a step of `size` rows, written on the device: one row per sequence, followed by padding.

    wide     int64 [NUM_WIDE, size]: token, position, slot, adapter; seed, position and top_p of the draw
    narrow   int32 [NUM_NARROW, size]: temperature, min_p, top_k of the draw
    spans    int32 [size, 3]: row, 1, position; a row of padding has 0 in place of 1
    tables   int32 [size, width]; entries after a sequence's last block are left unchanged
    """

    size: int
    wide: Tensor
    narrow: Tensor
    spans: Tensor
    tables: Tensor

    @classmethod
    def within(cls, wide: Tensor, narrow: Tensor, size: int, spans: Tensor, tables: Tensor) -> StepRows:
        """Create a step in the memory of a larger one: `wide` int64 and `narrow` int32, both flat."""
        numbers = wide[: NUM_WIDE * size].view(NUM_WIDE, size), narrow[: NUM_NARROW * size].view(NUM_NARROW, size)
        return cls(size, *numbers, spans, tables)

    def draws(self, count: int, *, searches: bool = True) -> SamplingTensors:
        """Return the sampling parameters of the first `count` rows. `searches`: any row may use top_k or top_p."""
        wide, narrow = self.wide[:, :count], self.narrow[:, :count]
        return SamplingTensors(
            narrow[DRAW_TEMPERATURE].view(torch.float32),
            narrow[DRAW_TOP_K],
            wide[DRAW_TOP_P].view(torch.float64),
            narrow[DRAW_MIN_P].view(torch.float32),
            wide[DRAW_SEED],
            wide[DRAW_POSITION],
            searches,
        )
