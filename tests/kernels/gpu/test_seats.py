"""A decode step's rows from seats, as the device's kernel fills them, beside plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.agreement.seats import random_seats, unwritten_rows
from kernels.gpu import seats as kernel
from kernels.interface.seats import BEFORE, SeatLayout
from kernels.plain import seats as plain

from .conftest import ON_GPU

pytestmark = [pytest.mark.gpu] if ON_GPU else [pytest.mark.interpret]
VOCAB = 500


@pytest.mark.parametrize(
    ("block_size", "size", "taken", "positions"),
    [
        (16, 5, [4, 0, 2], [0, 15, 16, 17, 63]),  # each end of a block; padding behind the rows
        (64, 1, [1], [9, 64 * 600 + 5, 3]),  # a table of more entries than a program copies in one go
        (32, 4, [], [1, 2, 3, 4]),  # nothing but padding
        (128, 3, [2, 1, 0], [127, 128, 128 * 512 - 1]),
    ],
)
def test_rows_are_those_of_plain_torch(
    device: torch.device, block_size: int, size: int, taken: list[int], positions: list[int]
) -> None:
    layout = SeatLayout(len(positions), max(positions) // block_size + 2, block_size)
    memory = random_seats(layout, taken, positions, torch.Generator().manual_seed(3))
    sampled = torch.tensor([VOCAB + 9, -4, 7][: max(2, len(positions))])
    expected_memory, expected = memory.clone(), unwritten_rows(layout, size, torch.device("cpu"))
    plain.fill_rows(expected_memory, layout, sampled, VOCAB, expected)
    there, found = memory.to(device), unwritten_rows(layout, size, device)
    kernel.fill_rows(there, layout, sampled.to(device), VOCAB, found)
    assert torch.equal(there.cpu(), expected_memory)  # seats moved on, and nothing else
    for name in ("wide", "narrow", "spans", "tables"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def test_steps_follow_each_other_without_a_word_of_the_host(device: torch.device) -> None:
    layout = SeatLayout(3, 4, 16)
    memory = random_seats(layout, [2, 0], [14, 0, 30], torch.Generator().manual_seed(3)).to(device)
    memory[3:].view(3, -1)[:, BEFORE] = -1
    sampled, found = torch.zeros(3, dtype=torch.int64, device=device), []
    for step in range(4):
        rows = unwritten_rows(layout, 3, device)
        kernel.fill_rows(memory, layout, sampled, VOCAB, rows)
        sampled[:2] = torch.tensor([10 + step, 20 + step], device=device)
        found.append(rows.wide[:2, :2].tolist())
    assert [positions for _, positions in found] == [[30 + step, 14 + step] for step in range(4)]
    assert [tokens for tokens, _ in found[1:]] == [[10 + step, 20 + step] for step in range(3)]
