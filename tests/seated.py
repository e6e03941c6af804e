"""What a recorded step reads from its sequences' seats, beside what filling everything anew would give it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.blocks.window import Window
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.run.seats import NO_SEAT, SeatChanges, Seats
from common.model_files.config import ModelConfig
from kernels.interface.draws import Draw, SamplingTensors
from kernels.interface.seats import (
    NUM_NARROW,
    NUM_WIDE,
    RUN_ADAPTER,
    RUN_POSITION,
    RUN_SLOT,
    RUN_TOKEN,
    SeatLayout,
    StepRows,
)
from kernels.plain.seats import fill_rows

UNWRITTEN = -77


class SeatedDevice:
    """The device's part of steps of up to `num_seats` rows, run whenever the test wants: `launch`, and `run` later."""

    def __init__(self, config: ModelConfig, kv: KVCache, num_seats: int, width: int) -> None:
        self.config, self.kv = config, kv
        self.seats = Seats(SeatLayout(num_seats, width, kv.block_size), config, kv)
        self.memory = empty_seats(self.seats.layout)
        self.sampled = torch.zeros(num_seats, dtype=torch.int64)

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> SeatedStep:
        """All changes reach the device with this step."""
        return SeatedStep(self, chunks, self.seats.take(chunks, sources))


class SeatedStep:
    """A launched step, and what its chunks said at that time."""

    def __init__(self, device: SeatedDevice, chunks: Sequence[SequenceChunk], changes: SeatChanges) -> None:
        self._device, self.changes = device, changes
        self.chunks = [chunk._replace(block_table=tuple(chunk.block_table)) for chunk in chunks]

    def run(self, tokens: Sequence[int], size: int = 0) -> StepRows:
        """Runs in a step of `size` rows, or as many as there are. Each row must get its token of `tokens`, and all that
        its chunk says. Returns what the device wrote."""
        device, size = self._device, max(size, len(self.chunks))
        device.memory.index_copy_(0, *map(torch.from_numpy, self.changes))
        layout = device.seats.layout
        spans = torch.full((size, 3), UNWRITTEN, dtype=torch.int32)
        tables = torch.full((size, layout.width), UNWRITTEN, dtype=torch.int32)
        wide = torch.full((NUM_WIDE * size,), UNWRITTEN)
        narrow = torch.full((NUM_NARROW * size,), UNWRITTEN, dtype=torch.int32)
        rows = StepRows.within(wide, narrow, size, spans, tables)
        fill_rows(device.memory, layout, device.sampled, device.config.vocab_size, rows)
        check_rows(rows, self.chunks, tokens, device.kv.block_size, device.config.window)
        return rows


def empty_seats(layout: SeatLayout) -> Tensor:
    """Of a device, before anything was sent."""
    memory = torch.zeros(layout.num_words, dtype=torch.int64)
    memory[: layout.num_seats].fill_(NO_SEAT)
    return memory


def check_rows(
    rows: StepRows, chunks: Sequence[SequenceChunk], tokens: Sequence[int], block_size: int, window: int
) -> None:
    """Asserts that each row is what its chunk says, with this token, and that the others are padding."""
    count, padding = len(chunks), rows.size - len(chunks)
    blocks = [chunk.block_table[chunk.start // block_size] for chunk in chunks]
    assert rows.wide[RUN_TOKEN].tolist() == [*tokens, *[0] * padding]
    assert rows.wide[RUN_POSITION].tolist() == [chunk.start for chunk in chunks] + [0] * padding
    slots = [block * block_size + chunk.start % block_size for block, chunk in zip(blocks, chunks, strict=True)]
    assert rows.wide[RUN_SLOT].tolist() == slots + [-1] * padding
    assert rows.wide[RUN_ADAPTER].tolist() == [chunk.adapter for chunk in chunks] + [-1] * padding
    spans = [[i, int(i < count), chunks[i].start if i < count else 0] for i in range(rows.size)]
    assert rows.spans.tolist() == spans
    for row, chunk in enumerate(chunks):
        first, end = Window(window, block_size).first_block(chunk.start), chunk.start // block_size + 1
        assert rows.tables[row, first:end].tolist() == list(chunk.block_table[first:end])
    draws = [
        Draw(0.0 if p.greedy else p.temperature, p.top_k, p.top_p, p.min_p, p.seed, chunk.start + 1)
        for chunk in chunks
        for p in (chunk.params,)
    ]
    found, expected = rows.draws(count), SamplingTensors.pack(draws, torch.device("cpu"))
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
