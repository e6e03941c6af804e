"""A model's forward pass as one native call: on a CPU what a graph of kernels is on a GPU. `recorder` makes it."""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.backend import NativeBackend
from kernels.cpu.native_plan import NativePlan
from kernels.cpu.structs import LINEAR, OP_NAMES, SAMPLED_ROWS, OpStruct, StepStruct, WeightsStruct


class YieldedRows(NamedTuple):
    """A buffer that a run returns in addition to its result: `width` elements per row, for all or sampled rows."""

    buffer: int
    width: int
    dtype: torch.dtype
    rows: int


class Program:
    """Recorded operations, and the buffers between them, which grow with the longest step."""

    def __init__(
        self,
        native: NativeBackend,
        dtype: torch.dtype,
        ops: ctypes.Array[OpStruct],
        row_bytes: tuple[int, ...],
        result: int,
        width: int,
        result_dtype: torch.dtype,
        yielded: tuple[YieldedRows, ...],
        kept: list[object],
    ) -> None:
        """`result` names the buffer that the result [rows, width] goes to; `kept` keeps alive what `ops` point at."""
        self._yielded = yielded
        self._native, self._dtype, self._ops, self._row_bytes = native, dtype, ops, row_bytes
        self._result, self._width, self._result_dtype, self._kept = result, width, result_dtype, kept
        self._lock = threading.Lock()  # two engines of one process may share a model, and so these buffers
        self._times: ctypes.Array[ctypes.c_int64] | None = None
        self._capacity = 0
        self._memory: list[Tensor] = []
        self._buffers = (ctypes.c_void_p * len(row_bytes))()
        self.num_ops, self.num_buffers = len(ops), len(row_bytes)

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        sampled: Tensor | None,
        kv: Tensor,
        plan: NativePlan,
        adapters: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs one step: writes the tokens' KV, returns [num sampled rows, width], and copies of what is yielded.

        Index tensors are int64. Logits are float32, hidden states of the program's type. The cache is of that type or
        of 8 bits, which may differ from run to run. `adapters`: of each row, for a program that adds what they change.
        """
        num_rows = token_ids.shape[0]
        num_sampled = num_rows if sampled is None else sampled.shape[0]
        out = torch.empty((num_sampled, self._width), dtype=self._result_dtype)
        with self._lock:
            self._reserve(num_rows)
            self._buffers[self._result] = out.data_ptr()
            step = self._step(num_sampled, token_ids, positions, slots, sampled, kv, plan, adapters)
            self._native.run(self._dtype, kv.dtype, self._ops, step)
            yielded = tuple(self._copy(each, num_rows, num_sampled) for each in self._yielded)
        return out, yielded

    def time_operations(self) -> None:
        """Starts to add up the time of each operation, from zero."""
        self._times = (ctypes.c_int64 * self.num_ops)()

    def timings(self) -> dict[str, float]:
        """Seconds since `time_operations`, by operation; matrix products by shape as well, [out]x[in]."""
        seconds: dict[str, float] = {}
        for op, nanoseconds in zip(self._ops, self._times or (), strict=False):
            name = OP_NAMES[op.kind]
            if op.kind == LINEAR:
                weight = WeightsStruct.from_address(op.weights[0])
                name = f"{name} {weight.n}x{weight.k}"
            seconds[name] = seconds.get(name, 0.0) + nanoseconds * 1e-9
        return seconds

    def _step(
        self,
        num_sampled: int,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        sampled: Tensor | None,
        kv: Tensor,
        plan: NativePlan,
        adapters: Tensor | None,
    ) -> StepStruct:
        return StepStruct(
            *(token_ids.shape[0], num_sampled, token_ids.data_ptr(), positions.data_ptr(), slots.data_ptr()),
            *(0 if sampled is None else sampled.data_ptr(), kv.data_ptr(), plan.shape.ctypes.data),
            *(plan.spans.ctypes.data, plan.tables.ctypes.data, plan.units.ctypes.data, plan.units.shape[0]),
            ctypes.addressof(self._buffers),
            0 if self._times is None else ctypes.addressof(self._times),
            *self._native.shared_cores,
            0 if adapters is None else adapters.data_ptr(),
        )

    def _copy(self, rows: YieldedRows, num_rows: int, num_sampled: int) -> Tensor:
        count = num_sampled if rows.rows == SAMPLED_ROWS else num_rows
        num_bytes = count * rows.width * rows.dtype.itemsize
        return self._memory[rows.buffer][:num_bytes].view(rows.dtype).view(count, rows.width).clone()

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= self._capacity:
            return
        self._capacity = max(num_rows, 2 * self._capacity if self._capacity else 1)
        self._memory = [
            torch.empty(0 if i == self._result else self._capacity * size + 64, dtype=torch.uint8)
            for i, size in enumerate(self._row_bytes)
        ]
        for i, memory in enumerate(self._memory):
            self._buffers[i] = memory.data_ptr()
