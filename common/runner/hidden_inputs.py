"""Where the rows of a recorded step find the hidden states that a draft head reads, and where they leave their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.model.batch import NO_PLACE, HiddenRows, SequenceChunk
from kernels.interface.host_copies import Staging


class HiddenInputs:
    """Device memory that recorded steps of up to `most_rows` rows read: one copy a step, before its replay."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self._memory = torch.full((2 * most_rows,), NO_PLACE, dtype=torch.int64, device=device)
        self._staging = Staging(self._memory, copies=2)

    def rows(self, size: int, count: int) -> HiddenRows:
        """What the first `count` rows of a step of `size` rows read."""
        before, kept = self._memory[: 2 * size].view(2, size)[:, :count]
        return HiddenRows(before, kept)

    def send(self, chunks: Sequence[SequenceChunk], size: int) -> None:
        """The places of `chunks`, one row each, and of the rows that pad a step of them to `size`."""
        host = self._staging.next()[: 2 * size].reshape(2, size)
        host[:, : len(chunks)] = np.array([[chunk.before, chunk.kept] for chunk in chunks]).T
        host[0, 0] = max(host[0, 0], NO_PLACE)  # no row is before the first
        host[:, len(chunks) :] = NO_PLACE
        self._staging.send(2 * size)
