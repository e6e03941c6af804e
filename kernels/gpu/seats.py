"""Fill the rows of a decode step from seats. A single launch, the first of a recorded step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import SeatLayout, StepRows
from kernels.interface import seats as at

POSITION, BEFORE, TOKEN, ADAPTER = (tl.constexpr(word) for word in (at.POSITION, at.BEFORE, at.TOKEN, at.ADAPTER))
SEED, TOP_P, TABLE = tl.constexpr(at.SEED), tl.constexpr(at.TOP_P), tl.constexpr(at.TABLE)
TEMPERATURE, MIN_P, TOP_K = tl.constexpr(at.TEMPERATURE), tl.constexpr(at.MIN_P), tl.constexpr(at.TOP_K)
ENTRIES = 256
"""Block table entries that a program copies at a time."""
WARPS = 4
"""Warps of a program, which fills one row of the step."""


# One compilation for all sizes of steps.
@triton.jit(do_not_specialize=["size"])
def place_rows(
    memory, sampled, wide, narrow, spans, tables, size, vocab, num_seats, seat_words, width,
    BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Program i fills row i and updates its seat, which no other program accesses."""
    i_row = tl.program_id(0)
    i_seat = tl.load(memory + i_row)
    m = i_seat >= 0
    p_seat = memory + num_seats + tl.where(m, i_seat, 0) * seat_words
    position = tl.load(p_seat + POSITION, mask=m, other=0)
    before = tl.load(p_seat + BEFORE, mask=m, other=-1)
    # An id that is no token marks logits that are not finite: the host ends its request later.
    fed = tl.minimum(tl.maximum(tl.load(sampled + tl.maximum(before, 0)), 0), vocab - 1)
    token = tl.where(before >= 0, fed, tl.load(p_seat + TOKEN, mask=m, other=0))
    block = tl.load(p_seat + TABLE + position // BLOCK_SIZE, mask=m, other=0)
    p_wide, p_narrow, p_span = wide + i_row, narrow + i_row, spans + i_row * 3
    tl.store(p_wide, token)
    tl.store(p_wide + size, position)
    tl.store(p_wide + 2 * size, tl.where(m, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    tl.store(p_wide + 3 * size, tl.load(p_seat + ADAPTER, mask=m, other=-1))
    tl.store(p_wide + 4 * size, tl.load(p_seat + SEED, mask=m, other=0))
    tl.store(p_wide + 5 * size, tl.where(m, position + 1, 0))
    tl.store(p_wide + 6 * size, tl.load(p_seat + TOP_P, mask=m, other=0))
    tl.store(p_narrow, tl.load(p_seat + TEMPERATURE, mask=m, other=0).to(tl.int32))
    tl.store(p_narrow + size, tl.load(p_seat + MIN_P, mask=m, other=0).to(tl.int32))
    tl.store(p_narrow + 2 * size, tl.load(p_seat + TOP_K, mask=m, other=0).to(tl.int32))
    tl.store(p_span, i_row)
    tl.store(p_span + 1, m.to(tl.int32))
    tl.store(p_span + 2, position.to(tl.int32))
    num_entries = tl.where(m, position // BLOCK_SIZE + 1, 0)
    for start in range(0, num_entries, ENTRIES):
        o = start + tl.arange(0, ENTRIES)
        m_entry = o < num_entries
        b_block = tl.load(p_seat + TABLE + o, mask=m_entry, other=0)
        tl.store(tables + i_row.to(tl.int64) * width + o, b_block.to(tl.int32), mask=m_entry)
    tl.debug_barrier()  # all threads of the program have read what is written now
    tl.store(p_seat + POSITION, position + 1, mask=m)
    tl.store(p_seat + BEFORE, i_row.to(tl.int64), mask=m)


def fill_rows(memory: Tensor, layout: SeatLayout, sampled: Tensor, vocab_size: int, rows: StepRows) -> None:
    """As `kernels.plain.seats.fill_rows`, in one launch."""
    place_rows[(rows.size,)](
        memory, sampled, rows.wide, rows.narrow, rows.spans, rows.tables, rows.size, vocab_size,
        layout.num_seats, layout.seat_words, layout.width,
        BLOCK_SIZE=layout.block_size, ENTRIES=ENTRIES, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
