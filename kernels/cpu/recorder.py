"""Records a model's forward pass, once, as a program that replays it natively.

A step of a small model is hundreds of short operations; calling each from Python costs as much as some of them take.
So the model's own code runs once with `Slot`s in place of tensors. Every operation of `kernels` that meets a slot
appends itself to the list that `native/program.h` runs, and leaves the numbers of rows, the KV cache and the step's
plan open. A slot's buffer is free again as soon as the model drops the slot.
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
    """The model has an operation or a size that the native program lacks."""


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """The device of slots, which `backends.backend` finds `RecordedKernels` by."""

    type: str = "program"


class Slot:
    """Rows that a step will hold, `width` elements each. Offers as much of a tensor as models use."""

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
    """Cosines or sines of every position, float32 [max_len, head_dim / 2]: a step takes its positions' rows."""

    table: Tensor
    device = SlotDevice()


class ProgramRecorder:
    """The operations so far, and the buffers that they use."""

    def __init__(self, native: NativeBackend, dtype: torch.dtype) -> None:
        self._native, self.dtype = native, dtype
        self._ops: list[OpStruct] = []
        self._row_bytes: list[int] = []
        self._free: list[int] = []
        self._kept: list[object] = []
        self._yielded: list[Slot] = []

    @property
    def open(self) -> Tensor:
        """Stands for an index tensor of the step, which the program gets when it runs."""
        return cast(Tensor, self)

    def rope(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Stands for a step's rows of the tables of every position, float32 [max_len, head_dim / 2]."""
        return cast(Tensor, RopeSlot(cos)), cast(Tensor, RopeSlot(sin))

    def embed(self, table: Tensor | PackedWeight, scale: float) -> Tensor:
        """Rows of `table` [vocab, width] for the step's token ids, times `scale`."""
        packed = isinstance(table, PackedWeight)
        out = self.slot(table.in_features if isinstance(table, PackedWeight) else table.shape[1], ALL_ROWS)
        return self.add(EMBED, out, weights=(table,), scale=scale, flags=int(packed))

    def linear(self, x: Tensor, weight: PackedWeight | None, width: int, activation: str, wide: bool) -> Tensor:
        """As `NativeBackend.linear`, to rows of `width` elements."""
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
        """As `NativeBackend.head_linear`; NotRecordable unless each of `num_heads` has packed weights."""
        source = slot_of(x)
        if len(weights) != num_heads:
            raise NotRecordable("a head's matrix is not packed")
        addresses = (ctypes.c_void_p * num_heads)(*(weight.address for weight in weights))
        self.keep(*weights)
        out = self.slot(num_heads * weights[0].out_features, source.rows)
        return self.add(HEADS, out, input=source, width=source.width, per_token=num_heads, weights=(addresses,))

    def lora(self, x: Tensor, y: Tensor, changes: ctypes.Array[LoraStruct], gated: bool) -> None:
        """As `NativeBackend.add_lora`, by the adapter of each row of the step."""
        source, out = slot_of(x), slot_of(y)
        self.add(LORA, out, input=source, weights=(changes,), per_token=source.width, flags=int(gated))

    def gate_panels(self, x: Tensor, activation: str) -> Tensor:
        """As `NativeBackend.gate_panels`."""
        source = slot_of(x)
        out = self.slot(source.width // 2, source.rows)
        return self.add(GATE, out, input=source, flags=EPILOGUES[activation])

    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """As `kernels.route`."""
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
        """As `kernels.Experts`, of an expert's matrices each."""
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
        """As `kernels.add_gated`."""
        source, share = slot_of(x), None if gates is None else slot_of(gates)
        if source.width % WIDTH_MULTIPLE:
            raise NotRecordable(f"{source.width} is no multiple of {WIDTH_MULTIPLE}")
        out = self.slot(source.width, source.rows)
        return self.add(ADD_GATED, out, input=source, extra=slot_of(other), extra2=share)

    def _spread(self, source: Slot, places: Slot) -> Slot:
        """Copies of each row, by expert."""
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
        """Copies by the weights of their experts."""
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
        """The sampled rows."""
        return self.add(SELECT, self.slot(source.width, SAMPLED_ROWS), input=source)

    def yield_rows(self, rows: Sequence[Tensor]) -> None:
        """Makes these slots results of the program, too: their buffers are not used for anything else."""
        self._yielded += (slot_of(each) for each in rows)

    def finish(self, result: Tensor) -> Program:
        """The program with this result, which the last operation makes: logits, or hidden states."""
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
        """A slot on a free buffer, or on a new one."""
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
        """Appends an operation on the rows of `output`, and returns that. `fields` are others of `OpStruct`."""
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
        """Keeps alive what an operation points at."""
        self._kept += objects


def record(dtype: torch.dtype, forward: Callable[[ProgramRecorder], Tensor]) -> Program | None:
    """Records `forward`, which makes rows of a recorder's slots, such as logits; None where no program can run it."""
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
    """`x`, which is a slot at run time. NotRecordable where it is a tensor."""
    if not isinstance(x, Slot):
        raise NotRecordable("an operation on a tensor that is not of this step")
    return x


def _alike(weights: Sequence[PackedWeight | None]) -> list[PackedWeight]:
    """The matrices of experts, which take the same inputs. NotRecordable where they do not, or are not packed."""
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
