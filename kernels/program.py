"""A model's forward pass, recorded once and replayed natively: on a CPU what a graph of kernels is on a GPU.

A step of a small model is hundreds of short operations; calling each from Python costs as much as some of them take.
So the model's own code runs once with `Slot`s in place of tensors. Every public operation of this package that meets a
slot appends itself to the list that `native/program.h` runs, with the numbers of rows, the KV cache and the step's plan
left open. A slot's buffer is used again as soon as the model has let go of the slot.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from kernels.kv_region import head_dim_of
from kernels.packed import PackedWeight, WeightsStruct

if TYPE_CHECKING:
    from kernels.native_backend import NativeBackend, NativePlan

EMBED, NORM, QUANTISE, LINEAR, ROTATE, ATTEND, SELECT = range(7)
NAMES: Final = ("embed", "norm", "quantise", "linear", "rotate", "attend", "select")
EPILOGUES: Final = {"": 0, "silu": 1, "gelu_tanh": 2}
WIDE: Final = 16
ALL_ROWS, SAMPLED_ROWS = 0, 1
LANES: Final = 16


class NotRecordable(Exception):
    """The model has an operation or a size that the native program lacks."""


class OpStruct(ctypes.Structure):
    """`struct Op`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "rows", "input", "output", "extra", "extra2")),
        *((name, ctypes.c_int64) for name in ("width", "layer", "window", "flags")),
        ("weights", ctypes.c_void_p * 3),
        *((name, ctypes.c_double) for name in ("scale", "eps")),
    )


class StepStruct(ctypes.Structure):
    """`struct Step`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_sampled")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "slots", "sampled", "kv", "shape", "spans")),
        *((name, ctypes.c_void_p) for name in ("tables", "units")),
        ("num_units", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
        ("times", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("cores", ctypes.c_int64),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where slots are: told from real devices by its type."""

    type: str = "program"


class Slot:
    """Rows that a step will hold, `width` elements each. Behaves as far as models need as a tensor."""

    device = Place()

    def __init__(self, recorder: Recorder, buffer: int, width: int, rows: int) -> None:
        self.recorder, self.buffer, self.width, self.rows = recorder, buffer, width, rows

    def __del__(self) -> None:
        self.recorder.release(self.buffer)

    def flatten(self, _first: int) -> Slot:
        return self

    def index_select(self, _dim: int, _sampled: object) -> Tensor:
        return self.recorder.select(self)


@dataclasses.dataclass(frozen=True, slots=True)
class RopeSlot:
    """Cosines or sines of every position, float32 [max_len, head_dim / 2]: a step takes its positions' rows."""

    table: Tensor
    device = Place()


class Recorder:
    """The operations of this package, recorded. Signatures are those of `dispatch.Backend`."""

    def __init__(self, native: NativeBackend, dtype: torch.dtype) -> None:
        self._native, self.dtype = native, dtype
        self._ops: list[OpStruct] = []
        self._row_bytes: list[int] = []
        self._free: list[int] = []
        self._kept: list[object] = []

    @property
    def open(self) -> Tensor:
        """Stands for an index tensor of the step, which every program gets when it runs."""
        return cast(Tensor, self)

    def rope(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of every position, float32 [max_len, head_dim / 2], of which a step takes its positions' rows."""
        return cast(Tensor, RopeSlot(cos)), cast(Tensor, RopeSlot(sin))

    def release(self, buffer: int) -> None:
        self._free.append(buffer)

    def embed(self, table: Tensor | PackedWeight, scale: float) -> Tensor:
        """Rows of `table` [vocab, width] for the step's token ids, times `scale`."""
        packed = isinstance(table, PackedWeight)
        out = self._slot(table.in_features if isinstance(table, PackedWeight) else table.shape[1], ALL_ROWS)
        self._add(
            *(EMBED, ALL_ROWS), output=out.buffer, width=out.width, weights=(table,), scale=scale, flags=int(packed)
        )
        return cast(Tensor, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        source = _slot(x)
        out = self._slot(source.width, source.rows)
        self._add(
            *(NORM, source.rows), input=source.buffer, output=out.buffer, width=out.width, weights=(weight,), eps=eps
        )
        return cast(Tensor, out)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        source, change = _slot(x), _slot(delta)
        total, out = self._slot(source.width, source.rows), self._slot(source.width, source.rows)
        self._add(
            *(NORM, source.rows),
            input=source.buffer,
            output=out.buffer,
            extra=change.buffer,
            extra2=total.buffer,
            width=out.width,
            weights=(weight,),
            eps=eps,
        )
        return cast(Tensor, total), cast(Tensor, out)

    def linear(self, x: Tensor, weight: PackedWeight | None, width: int, activation: str, wide: bool) -> Tensor:
        source = _slot(x)
        if weight is None:
            raise NotRecordable("a matrix is not packed")
        out = self._slot(width, source.rows, torch.float32 if wide else self.dtype)
        flags = EPILOGUES[activation] | (WIDE if wide else 0)
        self._kept.append(weight)
        if not weight.coded:
            self._add(
                *(LINEAR, source.rows),
                input=source.buffer,
                output=out.buffer,
                width=width,
                weights=(weight,),
                flags=flags,
            )
            return cast(Tensor, out)
        groups = weight.in_features // weight.group
        codes = self._slot(weight.in_features, source.rows, torch.uint8)
        scale, total = (self._slot(groups, source.rows, torch.float32) for _ in range(2))
        places: dict[str, Any] = {"extra": scale.buffer, "extra2": total.buffer, "weights": (weight,)}
        self._add(
            *(QUANTISE, source.rows), input=source.buffer, output=codes.buffer, width=weight.in_features, **places
        )
        self._add(*(LINEAR, source.rows), input=codes.buffer, output=out.buffer, width=width, flags=flags, **places)
        return cast(Tensor, out)

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        layer: int,
        slots: object,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        **features: object,
    ) -> Tensor:
        source = _slot(qkv)
        if features or kv.dtype not in (self.dtype, torch.float8_e4m3fn, torch.int8):
            raise NotRecordable(f"a KV cache of {kv.dtype}")
        dim, kv_heads = head_dim_of(kv), kv.shape[2]
        if dim % LANES:
            raise NotRecordable(f"head size {dim} is no multiple of {LANES}")
        out = self._slot(source.width - 2 * kv_heads * dim, ALL_ROWS)
        norms: object = None
        if q_norm is not None and k_norm is not None:
            norms = (ctypes.c_void_p * 2)(q_norm.data_ptr(), k_norm.data_ptr())
            self._kept += [q_norm, k_norm]
        tables = (cast(RopeSlot, cos).table, cast(RopeSlot, sin).table, norms)
        self._add(
            *(ROTATE, ALL_ROWS),
            input=source.buffer,
            output=out.buffer,
            width=source.width,
            layer=layer,
            weights=tables,
            eps=eps,
        )
        return cast(Tensor, out)

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        plan: object,
        scale: float,
        window: int,
        softcap: float,
        **features: object,
    ) -> Tensor:
        source = _slot(q)
        if features or head_dim_of(kv) > 1024:
            raise NotRecordable(f"attention with {', '.join(features) or 'such large heads'}")
        out = self._slot(source.width, ALL_ROWS)
        places: dict[str, Any] = {"input": source.buffer, "output": out.buffer, "width": out.width}
        self._add(ATTEND, ALL_ROWS, **places, layer=layer, window=window, scale=scale, eps=softcap)
        return cast(Tensor, out)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        raise NotRecordable("gate and up are one product here: see GatedLinear")

    def select(self, source: Slot) -> Tensor:
        """The sampled rows."""
        out = self._slot(source.width, SAMPLED_ROWS)
        self._add(SELECT, SAMPLED_ROWS, input=source.buffer, output=out.buffer, width=source.width)
        return cast(Tensor, out)

    def finish(self, logits: Tensor) -> Program:
        """The program whose result is `logits`."""
        last = _slot(logits)
        ops = (OpStruct * len(self._ops))(*self._ops)
        return Program(self._native, self.dtype, ops, tuple(self._row_bytes), last.buffer, last.width, self._kept)

    def _slot(self, width: int, rows: int, dtype: torch.dtype | None = None) -> Slot:
        """A slot on a buffer that nobody holds, or on a new one."""
        size = width * (dtype or self.dtype).itemsize
        for place, buffer in enumerate(self._free):
            if self._row_bytes[buffer] == size:
                del self._free[place]
                return Slot(self, buffer, width, rows)
        self._row_bytes.append(size)
        return Slot(self, len(self._row_bytes) - 1, width, rows)

    def _add(self, kind: int, rows: int, *, weights: tuple[Any, ...] = (), **fields: Any) -> None:
        places = {"input": -1, "output": -1, "extra": -1, "extra2": -1, **fields}
        self._kept += weights
        addresses = [_address(weight) for weight in weights] + [0] * (3 - len(weights))
        if kind in (EMBED, NORM) and places["width"] % LANES:
            raise NotRecordable(f"{places['width']} is no multiple of {LANES}")
        self._ops.append(OpStruct(kind=kind, rows=rows, weights=(ctypes.c_void_p * 3)(*addresses), **places))


class Program:
    """Recorded operations and the buffers between them, which grow with the longest step."""

    def __init__(
        self,
        native: NativeBackend,
        dtype: torch.dtype,
        ops: ctypes.Array[OpStruct],
        row_bytes: tuple[int, ...],
        result: int,
        width: int,
        kept: list[object],
    ) -> None:
        self._native, self._dtype, self._ops, self._row_bytes = native, dtype, ops, row_bytes
        self._result, self._width, self._kept = result, width, kept
        self._lock = threading.Lock()  # two engines of one process may share a model, and so these buffers
        self._times: ctypes.Array[ctypes.c_int64] | None = None
        self._capacity = 0
        self._memory: list[Tensor] = []
        self._buffers = (ctypes.c_void_p * len(row_bytes))()
        self.num_ops, self.num_buffers = len(ops), len(row_bytes)

    def run(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, sampled: Tensor | None, kv: Tensor, plan: NativePlan
    ) -> Tensor:
        """One step: writes the tokens' KV, returns float32 [num sampled rows, width]. Index tensors are int64.

        The cache is of the program's type or of one of 8 bits, whatever it was when the program was recorded.
        """
        num_rows = token_ids.shape[0]
        num_sampled = num_rows if sampled is None else sampled.shape[0]
        out = torch.empty((num_sampled, self._width), dtype=torch.float32)
        with self._lock:
            self._reserve(num_rows)
            self._buffers[self._result] = out.data_ptr()
            step = self._step(num_sampled, token_ids, positions, slots, sampled, kv, plan)
            self._native.run(self._dtype, kv.dtype, self._ops, step)
        return out

    def time_operations(self) -> None:
        """From now on add up the time of each operation, from zero."""
        self._times = (ctypes.c_int64 * self.num_ops)()

    def timings(self) -> dict[str, float]:
        """Seconds since `time_operations`, by operation; matrix products by shape as well, [out]x[in]."""
        seconds: dict[str, float] = {}
        for op, nanoseconds in zip(self._ops, self._times or (), strict=False):
            name = NAMES[op.kind]
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
    ) -> StepStruct:
        return StepStruct(
            *(token_ids.shape[0], num_sampled, token_ids.data_ptr(), positions.data_ptr(), slots.data_ptr()),
            *(0 if sampled is None else sampled.data_ptr(), kv.data_ptr(), plan.shape.ctypes.data),
            *(plan.spans.ctypes.data, plan.tables.ctypes.data, plan.units.ctypes.data, plan.units.shape[0]),
            ctypes.addressof(self._buffers),
            0 if self._times is None else ctypes.addressof(self._times),
            *self._native.shared_cores,
        )

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


def _slot(x: Tensor) -> Slot:
    if not isinstance(x, Slot):
        raise NotRecordable("an operation on a tensor that is not of this step")
    return x


def _address(weight: Any) -> int:
    """Of a tensor's data, of packed weights, or of a ctypes array; 0 for None."""
    if weight is None:
        return 0
    if isinstance(weight, PackedWeight):
        return weight.address
    if isinstance(weight, Tensor):
        return weight.data_ptr()
    return ctypes.addressof(weight)


class Recording:
    """A `dispatch.Backend` for slots: hands each operation to the recorder of its first argument."""

    def __getattr__(self, name: str) -> Any:
        def record(x: Slot, *args: Any, **features: Any) -> Any:
            return getattr(x.recorder, name)(x, *args, **features)

        return record
