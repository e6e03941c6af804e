"""Plan of a recorded step on devices whose plans are built on the host for each run of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from kernels.interface import AttentionPlan, KVLayout, QuerySpan

PlanAttention = Callable[[Sequence[QuerySpan], KVLayout, int, torch.device], AttentionPlan]


class HostPlan:
    """Implements `StepPlan` with the `plan_attention` of a backend. Padding rows are not planned."""

    def __init__(
        self,
        plan_attention: PlanAttention,
        num_rows: int,
        max_blocks: int,
        layout: KVLayout,
        num_heads: int,
        device: torch.device,
    ) -> None:
        self._plan_attention, self._layout, self._num_heads, self._device = plan_attention, layout, num_heads, device
        self.spans = torch.zeros(num_rows, 3, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.num_places = self.num_rows = 0

    def takes(self, lengths: Iterable[int]) -> bool:
        """Return True: each run builds a new plan of sufficient size."""
        return True

    def prepare(self) -> AttentionPlan:
        """Read the rows on the host, which waits for the device. A plan that contains only padding cannot be run."""
        spans = []
        for (row, count, start), table in zip(self.spans.tolist(), self.block_tables, strict=True):
            if count:
                spans.append(QuerySpan(row, count, start, table[: start // self._layout.block_size + 1].tolist()))
        self.num_rows = len(spans)
        if not spans:
            return AttentionPlan()
        return self._plan_attention(spans, self._layout, self._num_heads, self._device)
