"""Reference in torch for the kernel that computes the rows of a decode step from the seats of their sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import SeatLayout, StepRows
from kernels.interface import seats as at


def fill_rows(memory: Tensor, layout: SeatLayout, sampled: Tensor, vocab_size: int, rows: StepRows) -> None:
    """Write `rows` and advance the seats. `memory`: int64 [layout.num_words]; `sampled`: int64, the tokens of the rows
    of the previous step."""
    seats = memory[layout.num_seats :].view(layout.num_seats, layout.seat_words)
    rows.spans.zero_()
    for row, seat in enumerate(memory[: rows.size].tolist()):
        rows.spans[row, 0] = row
        if seat < 0:
            rows.wide[:, row] = torch.tensor([0, 0, -1, -1, 0, 0, 0])
            rows.narrow[:, row] = 0
            continue
        words = seats[seat]
        position, before = int(words[at.POSITION]), int(words[at.BEFORE])
        token = int(words[at.TOKEN]) if before < 0 else min(max(int(sampled[before]), 0), vocab_size - 1)
        index, offset = divmod(position, layout.block_size)
        table = words[at.TABLE : at.TABLE + index + 1]
        numbers = [token, position, int(table[index]) * layout.block_size + offset]
        numbers += [int(words[at.ADAPTER]), int(words[at.SEED]), position + 1, int(words[at.TOP_P])]
        rows.wide[:, row] = torch.tensor(numbers)
        rows.narrow[:, row] = words[[at.TEMPERATURE, at.MIN_P, at.TOP_K]].int()
        rows.spans[row, 1:] = torch.tensor([1, position])
        rows.tables[row, : len(table)] = table.int()
        words[at.POSITION], words[at.BEFORE] = position + 1, row
