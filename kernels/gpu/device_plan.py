"""Attention plan in device memory, updated in place so that a CUDA graph can be replayed for other sequences.

    plan = GPUPlan.empty(...)      once, outside of the graph
    plan.fill(spans)               before every replay, unless the graph writes spans and tables itself
    plan.prepare()                 first in the captured region: the device builds its work lists

Kernels read spans, block tables and work lists from the device. The host stores only data that never changes between
replays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kernels.gpu.query_work import QueryWork, Tiling, query_work
from kernels.gpu.work_list import SPLIT_TOKENS, DecodeWork, num_places
from kernels.interface import AttentionPlan, KVLayout, QuerySpan, fill_device

SPAN_FIELDS = 3  # row, num_rows, start
ALIGNMENT = 4  # int32 elements in 16 bytes: Triton compiles separate kernels for less aligned pointers
INTERPRETED_SMS = 2  # number of multiprocessors assumed for CPU tensors


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


class GPUPlan(AttentionPlan):
    """Up to `num_spans` spans of up to `max_rows` rows each.

    spans int32 [num_spans, 3]: row, num_rows, start; a span with num_rows 0 is padding, and its output stays unwritten.
    block_tables int32 [num_spans, width]; entries after a sequence's last block are not used.
    `single` and `wide`: whether spans of one row, and of several rows, may occur. `places` is the capacity for partial
    results of decode attention, by default the number that spans of maximum length need.
    """

    def __init__(
        self,
        num_spans: int,
        width: int,
        max_rows: int,
        layout: KVLayout,
        num_heads: int,
        device: torch.device,
        *,
        places: int | None = None,
    ) -> None:
        self.num_spans, self.width, self.max_rows = num_spans, width, max_rows
        self.layout, self.num_heads, self.device = layout, num_heads, device
        self.num_multiprocessors = num_multiprocessors(device)
        self.num_places = num_spans * num_places(width * layout.block_size) if places is None else places
        self._has_all_places = self.num_places >= num_spans * num_places(width * layout.block_size)
        self.single, self.wide = True, max_rows > 1
        fields = num_spans * SPAN_FIELDS
        self._tables_at = -(-fields // ALIGNMENT) * ALIGNMENT
        memory = torch.zeros(self._tables_at + num_spans * width, dtype=torch.int32, device=device)
        self.spans = memory[:fields].view(num_spans, SPAN_FIELDS)
        self.block_tables = memory[self._tables_at :].view(num_spans, width)
        self._memory = memory
        self._host_spans: list[tuple[int, int, int]] = []
        self._decode_work: dict[int, DecodeWork] = {}
        self._query_work: dict[tuple[Tiling, int, bool], QueryWork] = {}

    @classmethod
    def empty(cls, num_spans: int, max_blocks: int, layout: KVLayout, num_heads: int, device: torch.device) -> GPUPlan:
        """A plan for decode steps of up to `num_spans` sequences of up to `max_blocks` blocks; all padding yet.

        Its room is for sequences that fill the cache's blocks together. Such as share blocks may need more (`takes`).
        """
        most = num_spans * num_places(max_blocks * layout.block_size)
        filled = num_spans + layout.num_blocks * layout.block_size // SPLIT_TOKENS
        return cls(num_spans, max_blocks, 1, layout, num_heads, device, places=min(most, filled))

    @classmethod
    def sized_for(cls, spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device) -> GPUPlan:
        """A plan just large enough for `spans`, filled with them."""
        width = max((-(-span.length // layout.block_size) for span in spans), default=1)
        rows = max((span.num_rows for span in spans), default=1)
        places = sum(num_places(span.length) for span in spans if span.num_rows == 1)
        plan = cls(len(spans), width, rows, layout, num_heads, device, places=places)
        plan.fill(spans)
        plan.single = any(span.num_rows == 1 for span in spans)
        return plan

    def takes(self, lengths: Iterable[int]) -> bool:
        """Whether there is room for the partial results of single-row spans of these lengths."""
        if self._has_all_places:
            return True
        found = list(lengths)
        if len(found) + sum(found) // SPLIT_TOKENS <= self.num_places:  # never less than the exact number
            return True
        return sum(map(num_places, found)) <= self.num_places

    def fill(self, spans: Sequence[QuerySpan]) -> None:
        """Other sequences into the same device memory. `prepare` must follow, here or in a replayed graph.

        ValueError: they do not fit.
        """
        if len(spans) > self.num_spans:
            raise ValueError(f"{len(spans)} spans do not fit a plan of {self.num_spans}")
        size = self.layout.block_size
        for span in spans:
            if span.num_rows > self.max_rows or -(-span.length // size) > self.width:
                raise ValueError(
                    f"a span of {span.num_rows} rows and {-(-span.length // size)} blocks does not fit a plan of "
                    f"{self.max_rows} rows and {self.width} blocks a span"
                )
        if not self.takes(span.length for span in spans if span.num_rows == 1):
            raise ValueError(f"the spans have more than {self.num_places} partial results together")

        def write(numbers: np.ndarray) -> None:
            rows = numbers[: self.num_spans * SPAN_FIELDS].reshape(-1, SPAN_FIELDS)
            tables = numbers[self._tables_at :].reshape(-1, self.width)
            for i, span in enumerate(spans):
                rows[i] = (span.row, span.num_rows, span.start)
                blocks = -(-span.length // size)
                tables[i, :blocks] = span.block_table[:blocks]

        fill_device(self._memory, self._tables_at + len(spans) * self.width, write)
        self._host_spans = [(span.row, span.num_rows, span.start) for span in spans]
        self._query_work.clear()

    @property
    def num_rows(self) -> int:
        """Number of rows, including padding, which the kernels skip."""
        return self.num_spans

    def prepare(self) -> GPUPlan:
        """Rebuild the work lists on the device from the current spans in its memory.

        Takes one launch for each window used so far. The first attention with a new window builds its list itself.
        """
        for work in self._decode_work.values():
            work.build(self.spans)
        return self

    def decode_work(self, window: int) -> DecodeWork:
        """Return the splits of the single-row spans for `window`. Built at first use, then updated by `prepare`."""
        if window not in self._decode_work:
            work = DecodeWork(self.num_spans, self.num_places, window, self.device)
            work.build(self.spans)
            self._decode_work[window] = work
        return self._decode_work[window]

    def query_work(self, tiling: Tiling, window: int, *, split: bool) -> QueryWork:
        """Return the tiles of the spans with several rows, and, if `split` allows them, their key splits."""
        key = (tiling, window, split)
        if key not in self._query_work:
            self._query_work[key] = query_work(self._host_spans, tiling, window, self.device, split=split)
        return self._query_work[key]
