"""Where sequences sit on the device from one decode step to the next, as int64 words, and what a step makes of it.

    [seat of each row, -1: padding] [seat 0: fields, block table] [seat 1] ...

A step reads for each of its rows the seat, and from there the token, which the step before sampled or the host gave,
the position, the block table, and how the row draws. It leaves the position and the row behind for the next step, so
the host has nothing to say while the same sequences go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.interface.draws import SamplingTensors

POSITION, BEFORE, TOKEN, ADAPTER, SEED, TOP_P, TEMPERATURE, MIN_P, TOP_K, TABLE = range(10)
"""Words of a seat. BEFORE is its row in the step before, whose token it runs; -1: it runs TOKEN. TOP_P holds the bits
of a float64, TEMPERATURE and MIN_P those of a float32. The entries of the block table follow from TABLE on."""
RUN_TOKEN, RUN_POSITION, RUN_SLOT, RUN_ADAPTER, DRAW_SEED, DRAW_POSITION, DRAW_TOP_P = range(7)
NUM_WIDE = 7
"""Rows of a step's numbers of 64 bits."""
DRAW_TEMPERATURE, DRAW_MIN_P, DRAW_TOP_K = range(3)
NUM_NARROW = 3
"""Rows of its numbers of 32 bits."""


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
    """What a step of `size` rows runs, written on the device: a row for each sequence, and padding behind.

    wide     int64 [NUM_WIDE, size]: token, position, slot, adapter; seed, position and top_p of the draw
    narrow   int32 [NUM_NARROW, size]: temperature, min_p, top_k of the draw
    spans    int32 [size, 3]: row, 1, position; a row of padding has 0 in place of 1
    tables   int32 [size, width]; entries behind a sequence's last block stay what they were
    """

    size: int
    wide: Tensor
    narrow: Tensor
    spans: Tensor
    tables: Tensor

    @classmethod
    def within(cls, wide: Tensor, narrow: Tensor, size: int, spans: Tensor, tables: Tensor) -> StepRows:
        """In the memory of a larger step: `wide` int64 and `narrow` int32, both flat."""
        numbers = wide[: NUM_WIDE * size].view(NUM_WIDE, size), narrow[: NUM_NARROW * size].view(NUM_NARROW, size)
        return cls(size, *numbers, spans, tables)

    def draws(self, count: int, *, searches: bool = True) -> SamplingTensors:
        """How the first `count` rows draw; `searches`: whether any of them may have a top_k or a top_p."""
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
