"""Compare filling decode steps from seats with plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.agreement.gate import Finding
from kernels.interface import BEFORE, NUM_NARROW, NUM_WIDE, POSITION, TABLE, TOKEN, SeatLayout, StepRows
from kernels.plain import seats as plain

FillRows = Callable[[Tensor, SeatLayout, Tensor, int, StepRows], None]
UNWRITTEN = -77
"""Marker that is not a valid token, position or block."""
MOST_BLOCKS = 1 << 24
"""Number of blocks for which slot indices need 64 bits."""
NUM_SEATS, NUM_TAKEN = 21, 18
"""Odd, and not all in use: rows of free seats must not change."""


def seats_check(
    fill: FillRows, block_size: int, longest: int, device: torch.device, random: torch.Generator
) -> Finding:
    """Check the device function `fill` with padding and sequences of up to `longest` tokens, some of which continue
    from the previous step."""
    positions = [min(position, longest - 1) for position in (0, block_size - 1, block_size, longest)]
    positions += torch.randint(longest, (NUM_SEATS - len(positions),), generator=random).tolist()
    layout, vocab = SeatLayout(NUM_SEATS, -(-longest // block_size), block_size), 1000
    memory = random_seats(layout, torch.randperm(NUM_SEATS, generator=random)[:NUM_TAKEN].tolist(), positions, random)
    sampled = torch.randint(-3, vocab + 3, (NUM_SEATS,), generator=random)
    mine, other = memory.to(device), memory.clone()
    found, expected = unwritten_rows(layout, NUM_SEATS, device), unwritten_rows(layout, NUM_SEATS, memory.device)
    fill(mine, layout, sampled.to(device), vocab, found)
    plain.fill_rows(other, layout, sampled, vocab, expected)
    pairs = [("seats", mine, other)]
    pairs += [(name, getattr(found, name), getattr(expected, name)) for name in ("wide", "narrow", "spans", "tables")]
    wrong = {name: int((one.cpu() != right).sum()) for name, one, right in pairs}
    problem = ", ".join(f"{count} of its {name} differ" for name, count in wrong.items() if count)
    words = f"{NUM_TAKEN} of {NUM_SEATS} rows, tables of {layout.width} blocks of {block_size}"
    return Finding("rows from seats", words, float(sum(wrong.values())), 0.0, problem)


def random_seats(layout: SeatLayout, taken: Sequence[int], positions: Sequence[int], random: torch.Generator) -> Tensor:
    """Return random seats at the given positions. Row i of a step uses seat `taken[i]`."""
    memory = torch.randint(-(2**62), 2**62, (layout.num_words,), generator=random)
    memory[: layout.num_seats] = torch.tensor([*taken, *[-1] * (layout.num_seats - len(taken))])
    words = memory[layout.num_seats :].view(layout.num_seats, layout.seat_words)
    words[:, POSITION] = torch.tensor(positions)
    words[:, BEFORE] = torch.arange(layout.num_seats) % 3 - 1
    words[:, TOKEN] %= 1000
    words[:, TABLE:] %= MOST_BLOCKS
    return memory


def unwritten_rows(layout: SeatLayout, size: int, device: torch.device) -> StepRows:
    """Return the unwritten outputs of a step of `size` rows."""
    wide = torch.full((NUM_WIDE * size,), UNWRITTEN, device=device)
    narrow = torch.full((NUM_NARROW * size,), UNWRITTEN, dtype=torch.int32, device=device)
    spans = torch.full((size, 3), UNWRITTEN, dtype=torch.int32, device=device)
    tables = torch.full((size, layout.width), UNWRITTEN, dtype=torch.int32, device=device)
    return StepRows.within(wide, narrow, size, spans, tables)
