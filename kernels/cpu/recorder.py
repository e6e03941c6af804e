"""Records a model's forward pass once, as a program that is replayed natively.

A step of a small model has hundreds of short operations, and a call from Python can cost as much as the operation.
The model's own code therefore runs once with `Slot`s instead of tensors. Every operation of `kernels` that gets a slot
appends itself to the list that `native/program.h` runs. The number of rows, the KV cache and the plan are parameters of
each run. A slot's buffer is released when the model drops the slot.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from kernels.cpu.backend import NativeBackend, native_backend
from kernels.cpu.native_plan import WIDTH_MULTIPLE
from kernels.cpu.packed import PackedWeight
from kernels.cpu.program import Program, YieldedRows
from kernels.cpu.structs import (
    ADD_GATED,
    ALL_ROWS,
    COMBINE,
    EMBED,
    EPILOGUES,
    EXPERTS,
    GATE,
    GROUP,
    HEADS,
    LINEAR,
    LORA,
    NORM,
    QUANTISE,
    ROUTE,
    SAMPLED_ROWS,
    SELECT,
    SPREAD,
    WIDE,
    LoraStruct,
    OpStruct,
    RoutingStruct,
)
from kernels.interface import Routing

log = logging.getLogger("kernels")


class NotRecordable(Exception):
    """The model has an operation or a size that the native program does not support."""


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """Device of slots. `backends.backend` maps it to `RecordedKernels`."""

    type: str = "program"


class Slot:
    """Rows of a future step, `width` elements each. Implements the part of the tensor interface that models use."""

    device = SlotDevice()

    def __init__(self, recorder: ProgramRecorder, buffer: int, width: int, rows: int, dtype: torch.dtype) -> None:
        self.recorder, self.buffer, self.width, self.rows, self.dtype = recorder, buffer, width, rows, dtype

    def __del__(self) -> None:
        self.recorder.release(self.buffer)

    def flatten(self, _first: int) -> Slot:
        return self

    def index_select(self, _dim: int, _sampled: object) -> Tensor:
        return self.recorder.select(self)


@dataclass(frozen=True, slots=True)
class RopeSlot:
    """Cosines or sines of every position, float32 [max_len, head_dim / 2]. A step reads the rows of its positions."""

    table: Tensor
    device = SlotDevice()


class ProgramRecorder:
    """The recorded operations and their buffers."""

    def __init__(self, native: NativeBackend, dtype: torch.dtype) -> None:
        self._native, self.dtype = native, dtype
        self._ops: list[OpStruct] = []
        self._row_bytes: list[int] = []
        self._free: list[int] = []
        self._kept: list[object] = []
        self._yielded: list[Slot] = []

    @property
    def open(self) -> Tensor:
        """Placeholder for an index tensor that is passed to each run of the program."""
        return cast(Tensor, self)

    def rope(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return placeholders for a step's rows of the tables, float32 [max_len, head_dim / 2]."""
        return cast(Tensor, RopeSlot(cos)), cast(Tensor, RopeSlot(sin))

    def embed(self, table: Tensor | PackedWeight, scale: float) -> Tensor:
        """Record the lookup of the step's token ids in `table` [vocab, width], times `scale`."""
        packed = isinstance(table, PackedWeight)
        out = self.slot(table.in_features if isinstance(table, PackedWeight) else table.shape[1], ALL_ROWS)
        return self.add(EMBED, out, weights=(table,), scale=scale, flags=int(packed))

    def linear(self, x: Tensor, weight: PackedWeight | None, width: int, activation: str, wide: bool) -> Tensor:
        """Record `NativeBackend.linear` with rows of `width` elements."""
        source = slot_of(x)
        if weight is None:
            raise NotRecordable("a matrix is not packed")
        out = self.slot(width, source.rows, torch.float32 if wide else self.dtype)
        flags = EPILOGUES[activation] | (WIDE if wide else 0)
        if not weight.quantised:
            return self.add(LINEAR, out, input=source, weights=(weight,), flags=flags)
        numbers, scale, total = self._quantised(source, weight, 0)
        return self.add(LINEAR, out, input=numbers, extra=scale, extra2=total, weights=(weight,), flags=flags)

    def head_linear(self, x: Tensor, weights: Sequence[PackedWeight], num_heads: int) -> Tensor:
        """Record `NativeBackend.head_linear`. Raises NotRecordable unless all `num_heads` heads have packed weights."""
        source = slot_of(x)
        if len(weights) != num_heads:
            raise NotRecordable("a head's matrix is not packed")
        addresses = (ctypes.c_void_p * num_heads)(*(weight.address for weight in weights))
        self.keep(*weights)
        out = self.slot(num_heads * weights[0].out_features, source.rows)
        return self.add(HEADS, out, input=source, width=source.width, per_token=num_heads, weights=(addresses,))

    def lora(self, x: Tensor, y: Tensor, changes: ctypes.Array[LoraStruct], gated: bool) -> None:
        """Record `NativeBackend.add_lora` with the adapter of each row of the step."""
        source, out = slot_of(x), slot_of(y)
        self.add(LORA, out, input=source, weights=(changes,), per_token=source.width, flags=int(gated))

    def gate_panels(self, x: Tensor, activation: str) -> Tensor:
        """Record `NativeBackend.gate_panels`."""
        source = slot_of(x)
        out = self.slot(source.width // 2, source.rows)
        return self.add(GATE, out, input=source, flags=EPILOGUES[activation])

    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Record `kernels.route`."""
        source, per_token = slot_of(logits), routing.per_token
        chosen, shares = (self.slot(per_token, source.rows, kind) for kind in (torch.int32, torch.float32))
        rule = (routing.correction, RoutingStruct.of(routing))
        self.add(ROUTE, chosen, input=source, extra=shares, width=source.width, per_token=per_token, weights=rule)
        return cast(Tensor, chosen), cast(Tensor, shares)

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        gate_up: Sequence[PackedWeight | None],
        down: Sequence[PackedWeight | None],
        activation: str,
    ) -> Tensor:
        """Record `kernels.Experts`, with one matrix per expert in `gate_up` and in `down`."""
        source, choice, per_token = slot_of(x), slot_of(chosen), slot_of(chosen).width
        first, second = _alike(gate_up), _alike(down)
        places, units = (self.slot(width, source.rows, torch.int32) for width in (per_token, 4 * per_token))
        self.add(GROUP, places, input=choice, width=len(gate_up), per_token=per_token, units=units)
        if first[0].quantised:
            numbers = self._quantised(source, first[0], 0)
            inputs = tuple(self._spread(part, places) for part in numbers)
        else:
            inputs = (self._spread(source, places),)
        inner = self.slot(per_token * first[0].out_features // 2, source.rows)
        self._grouped(inner, inputs, first, units, per_token, EPILOGUES[activation])
        inputs = self._quantised(inner, second[0], per_token) if second[0].quantised else (inner,)
        made = self.slot(per_token * second[0].out_features, source.rows)
        self._grouped(made, inputs, second, units, per_token, EPILOGUES[""])
        out = self.slot(source.width, source.rows)
        return self.add(COMBINE, out, input=made, extra=places, extra2=slot_of(shares), per_token=per_token)

    def add_gated(self, x: Tensor, other: Tensor, gates: Tensor | None) -> Tensor:
        """Record `kernels.add_gated`."""
        source, share = slot_of(x), None if gates is None else slot_of(gates)
        if source.width % WIDTH_MULTIPLE:
            raise NotRecordable(f"{source.width} is no multiple of {WIDTH_MULTIPLE}")
        out = self.slot(source.width, source.rows)
        return self.add(ADD_GATED, out, input=source, extra=slot_of(other), extra2=share)

    def _spread(self, source: Slot, places: Slot) -> Slot:
        """Record the copies of each row, sorted by expert."""
        out = self.slot(places.width * source.width, source.rows, source.dtype)
        num_bytes = source.width * source.dtype.itemsize
        self.add(SPREAD, out, input=source, extra=places, width=num_bytes, per_token=places.width)
        return out

    def _quantised(self, source: Slot, weight: PackedWeight, per_token: int) -> tuple[Slot, Slot, Slot]:
        """Quantise rows, or `per_token` copies of each. Returns slots of bytes, scales and sums."""
        times, groups = max(1, per_token), weight.in_features // weight.group
        numbers = self.slot(times * weight.in_features, source.rows, torch.uint8)
        scale, total = (self.slot(times * groups, source.rows, torch.float32) for _ in range(2))
        self.add(
            QUANTISE,
            numbers,
            input=source,
            extra=scale,
            extra2=total,
            width=weight.in_features,
            weights=(weight,),
            per_token=per_token,
        )
        return numbers, scale, total

    def _grouped(
        self,
        out: Slot,
        inputs: Sequence[Slot],
        weights: Sequence[PackedWeight],
        units: Slot,
        per_token: int,
        epilogue: int,
    ) -> None:
        """Record the product of the copies with the weights of their experts."""
        addresses = (ctypes.c_void_p * len(weights))(*(weight.address for weight in weights))
        self.keep(*weights)
        numbers, scale, total = inputs if len(inputs) == 3 else (inputs[0], None, None)
        self.add(
            EXPERTS,
            out,
            input=numbers,
            extra=scale,
            extra2=total,
            units=units,
            width=len(weights),
            weights=(addresses,),
            per_token=per_token,
            flags=epilogue,
        )

    def select(self, source: Slot) -> Tensor:
        """Record the selection of the sampled rows."""
        return self.add(SELECT, self.slot(source.width, SAMPLED_ROWS), input=source)

    def yield_rows(self, rows: Sequence[Tensor]) -> None:
        """Return these slots from the program as well. Their buffers are not reused."""
        self._yielded += (slot_of(each) for each in rows)

    def finish(self, result: Tensor) -> Program:
        """Return the program. Its result, logits or hidden states, must be the output of the last operation."""
        last = slot_of(result)
        if self._ops[-1].output != last.buffer:
            raise NotRecordable("the last operation does not make the result")
        # A separate buffer: the result has only the sampled rows; the slot's buffer may have been used for all rows.
        self._row_bytes.append(last.width * last.dtype.itemsize)
        self._ops[-1].output = len(self._row_bytes) - 1
        ops = (OpStruct * len(self._ops))(*self._ops)
        sizes = tuple(self._row_bytes)
        yielded = tuple(YieldedRows(slot.buffer, slot.width, slot.dtype, slot.rows) for slot in self._yielded)
        return Program(
            self._native, self.dtype, ops, sizes, len(sizes) - 1, last.width, last.dtype, yielded, self._kept
        )

    def slot(self, width: int, rows: int, dtype: torch.dtype | None = None) -> Slot:
        """Return a slot with a free buffer, or with a new one."""
        kind = dtype or self.dtype
        size = width * kind.itemsize
        for place, buffer in enumerate(self._free):
            if self._row_bytes[buffer] == size:
                del self._free[place]
                return Slot(self, buffer, width, rows, kind)
        self._row_bytes.append(size)
        return Slot(self, len(self._row_bytes) - 1, width, rows, kind)

    def release(self, buffer: int) -> None:
        self._free.append(buffer)

    def add(
        self,
        kind: int,
        output: Slot,
        *,
        input: Slot | None = None,
        extra: Slot | None = None,
        extra2: Slot | None = None,
        units: Slot | None = None,
        width: int | None = None,
        weights: tuple[Any, ...] = (),
        **fields: Any,
    ) -> Tensor:
        """Append an operation on the rows of `output` and return `output`. `fields`: more fields of `OpStruct`."""
        width = output.width if width is None else width
        if kind in (EMBED, NORM) and width % WIDTH_MULTIPLE:
            raise NotRecordable(f"{width} is no multiple of {WIDTH_MULTIPLE}")
        self._kept += weights
        addresses = [_address(weight) for weight in weights] + [0] * (3 - len(weights))
        slots = {"input": input, "output": output, "extra": extra, "extra2": extra2, "units": units}
        buffers = {name: -1 if slot is None else slot.buffer for name, slot in slots.items()}
        pointers = (ctypes.c_void_p * 3)(*addresses)
        self._ops.append(OpStruct(kind=kind, rows=output.rows, width=width, weights=pointers, **buffers, **fields))
        return cast(Tensor, output)

    def keep(self, *objects: object) -> None:
        """Keep the objects that operations point to alive."""
        self._kept += objects


def record(dtype: torch.dtype, forward: Callable[[ProgramRecorder], Tensor]) -> Program | None:
    """Record `forward`, which computes a result such as logits from slots. Return None if it cannot be recorded."""
    native = native_backend()
    if native is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        recorder = ProgramRecorder(native, dtype)
        program = recorder.finish(forward(recorder))
    except NotRecordable as reason:
        log.warning("the model runs operation by operation in PyTorch, which is slower: %s", reason)
        return None
    log.info("model compiled to one native CPU program of %d operations", program.num_ops)
    return program


def slot_of(x: Tensor) -> Slot:
    """Cast `x` to a slot. Raises NotRecordable if it is a tensor."""
    if not isinstance(x, Slot):
        raise NotRecordable("an operation on a tensor that is not of this step")
    return x


def _alike(weights: Sequence[PackedWeight | None]) -> list[PackedWeight]:
    """Return the experts' matrices. Raises NotRecordable unless all are packed and have the same shape and format."""
    packed = [weight for weight in weights if weight is not None]
    kinds = {(w.quantised, w.format if w.quantised else 0, w.group, w.out_features, w.in_features) for w in packed}
    if len(packed) != len(weights) or len(kinds) != 1:
        raise NotRecordable("the matrices of experts are not packed, or not alike")
    return packed


def _address(weight: Any) -> int:
    """Return the address of a tensor's data, packed weights, or a ctypes array; 0 for None."""
    if weight is None:
        return 0
    if isinstance(weight, PackedWeight):
        return weight.address
    if isinstance(weight, Tensor):
        return weight.data_ptr()
    return ctypes.addressof(weight)
