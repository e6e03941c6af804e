"""The CPU's backend: `native/` called through ctypes. Takes float32 and bfloat16; what it cannot do, torch does.

A row's result does not depend on the rest of the batch, on chunking, or on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import torch_backend
from kernels.attention_plan import AttentionPlan, KVLayout, QuerySpan
from kernels.kv_region import head_dim_of
from kernels.native_build import load_native
from kernels.packed import INT8, PackedWeight, panel_size, room
from kernels.program import EPILOGUES, NotRecordable, OpStruct, Program, Recorder, StepStruct

if TYPE_CHECKING:
    from kernels.sampling import SamplingTensors

log = logging.getLogger("kernels")
INT8_DOTS, BFLOAT16_PAIRS, HALVES = 1, 2, 4
TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int8: 3}
"""Of activations the first two; of a KV cache the activations' own, or one of the last."""
LANES: Final = 16
MAX_HEAD_DIM: Final = 1024
MANY_ODD: Final = 512  # one weight in so many may be odd: more would cost time
ROWS_PER_UNIT: Final = 96  # query rows (tokens x heads of a group) that share one pass over the keys


@dataclass(frozen=True, slots=True)
class NativePlan(AttentionPlan):
    """spans int64 [S, 4]: row, rows, start, first entry in tables; tables int32; units int32 [U, 4]: span, KV head,
    first query, count; shape int64 [5]: layers, KV heads, block size, head_dim, heads."""

    spans: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    units: npt.NDArray[np.int32]
    shape: npt.NDArray[np.int64]


class NativeBackend:
    """Implements `dispatch.Backend`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, real, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._attend = library.diptych_attend
        self._attend.argtypes = [
            *(number, number, pointer, integer, pointer, pointer, pointer, pointer, pointer, integer, pointer),
            *(integer, integer, real, real, number),
        ]
        self._norm = library.diptych_rms_norm
        self._norm.argtypes = [number, *(pointer,) * 5, integer, integer, real, number]
        self._rotate = library.diptych_rotate_and_write
        self._rotate.argtypes = [number, number, *(pointer,) * 4, integer, *(pointer,) * 5, real, integer, number]
        self._gated = library.diptych_gated
        self._gated.argtypes = [number, pointer, pointer, integer, integer, number, number]
        self._quantise = library.diptych_quantise
        self._quantise.argtypes = [number, pointer, integer, integer, integer, number, pointer, pointer, pointer]
        self._linear = library.diptych_linear
        self._linear.argtypes = [*(pointer,) * 4, integer, number, pointer, number, number]
        self._choose_exponents = library.diptych_choose_exponents
        self._choose_exponents.argtypes = [pointer, integer, integer, pointer, pointer, number]
        self._shorten = library.diptych_shorten
        self._shorten.argtypes = [pointer, integer, integer, pointer, pointer, pointer, number]
        self._unpack_rows = library.diptych_unpack_rows
        self._unpack_rows.argtypes = [pointer, pointer, integer, integer, pointer, number]
        self._sample = library.diptych_sample
        self._sample.argtypes = [pointer, pointer, integer, integer, *(pointer,) * 7, number]
        self._read = library.diptych_read
        self._read.argtypes, self._read.restype = [pointer, integer, number], integer
        self._run = library.diptych_run
        self._run.argtypes = [number, number, pointer, integer, pointer, number]
        for function in (
            *(self._attend, self._norm, self._rotate, self._gated),
            *(self._quantise, self._linear, self._sample, self._run),
            *(self._choose_exponents, self._shorten, self._unpack_rows),
        ):
            function.restype = None
        self.shared_cores = (0, 0)
        """The address of `CoreShare`'s bytes, 0 for none, and how many cores those share; of all steps that begin."""
        features = int(library.diptych_features())
        self.multiplies_bfloat16, self.multiplies_int8 = bool(features & BFLOAT16_PAIRS), bool(features & INT8_DOTS)
        self.widens_float16 = bool(features & HALVES)

    def sample(
        self, logits: Tensor | Sequence[Tensor], draws: SamplingTensors, allowed: Sequence[Tensor | None]
    ) -> Tensor:
        """As `kernels.sample`; one `allowed` for each row."""
        count, width = len(allowed), logits[0].shape[0] if len(logits) else 0
        if isinstance(logits, Tensor):
            logits = logits.contiguous()
            addresses = range(logits.data_ptr(), logits.data_ptr() + 4 * width * count, 4 * width)
            places = (ctypes.c_void_p * count)(*addresses)
        else:
            logits = [row.contiguous() for row in logits]
            places = (ctypes.c_void_p * count)(*(row.data_ptr() for row in logits))
        out = torch.empty(count, dtype=torch.int64)
        masks = (ctypes.c_void_p * count)(*(None if mask is None else mask.data_ptr() for mask in allowed))
        columns = (draws.temperature, draws.min_p, draws.top_k, draws.top_p, draws.seed, draws.position)
        self._sample(
            *(ctypes.addressof(places), ctypes.addressof(masks), count, width),
            *(*(column.data_ptr() for column in columns), out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def read(self, memory: Tensor) -> int:
        """Reads all of a contiguous tensor, and sums it up as int64 numbers: for measuring bandwidth."""
        return int(self._read(memory.data_ptr(), memory.numel() * memory.element_size(), torch.get_num_threads()))

    def run(self, dtype: torch.dtype, kv_dtype: torch.dtype, ops: ctypes.Array[OpStruct], step: StepStruct) -> None:
        """One step of a recorded program."""
        place = ctypes.addressof(step)
        self._run(TYPES[dtype], TYPES[kv_dtype], ctypes.addressof(ops), len(ops), place, torch.get_num_threads())

    def quantise(self, x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 [T, in] and scales and sums float32 [T, groups] of x [T, in], for 8- or 4-bit weights."""
        rows, groups = x.shape[0], weight.in_features // weight.group
        codes = torch.empty(x.shape, dtype=torch.uint8)
        scale, total = torch.empty(rows, groups), torch.empty(rows, groups)
        self._quantise(
            *(TYPES[x.dtype], x.data_ptr(), rows, weight.in_features, weight.group, weight.format == INT8),
            *(codes.data_ptr(), scale.data_ptr(), total.data_ptr()),
        )
        return codes, scale, total

    def linear(self, x: Tensor, weight: PackedWeight, activation: str, wide: bool) -> Tensor:
        """x [T, in] times packed weights: [T, out], or [T, out / 2] of gated ones; float32 when `wide`."""
        x = x.contiguous()
        rows, width = x.shape[0], weight.out_features // 2 if activation else weight.out_features
        out = torch.empty((rows, width), dtype=torch.float32 if wide else x.dtype)
        codes, scale, total = self.quantise(x, weight) if weight.coded else (x, None, None)
        self._linear(
            *(weight.address, codes.data_ptr(), 0 if scale is None else scale.data_ptr()),
            *(0 if total is None else total.data_ptr(), rows, TYPES[out.dtype], out.data_ptr()),
            *(EPILOGUES[activation], torch.get_num_threads()),
        )
        return out

    def shorten(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """bfloat16 [whole panels, k] in 12 bits: codes, exponents, odd weights; None where too many are odd."""
        panels, columns, threads = rows.shape[0] // panel_size(), rows.shape[1], torch.get_num_threads()
        exponents, begins = room(panels * 32), torch.empty(panels + 1, dtype=torch.int64)
        self._choose_exponents(rows.data_ptr(), panels, columns, exponents.data_ptr(), begins.data_ptr(), threads)
        num_odd = int(begins[-1])
        if num_odd * MANY_ODD > rows.numel():
            return None
        codes, odd = room(rows.numel() * 3 // 2), torch.cat((begins, begins.new_zeros(num_odd)))
        places = (exponents.data_ptr(), codes.data_ptr(), odd.data_ptr())
        self._shorten(rows.data_ptr(), panels, columns, *places, threads)
        return codes, exponents, odd

    def unpack_rows(self, weight: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows, int64 [T], of dense weights in `dtype`, as they lie in the panels: [T, in]."""
        rows = rows.contiguous()
        out = torch.empty((rows.numel(), weight.in_features), dtype=dtype)
        size, threads = weight.in_features * dtype.itemsize, torch.get_num_threads()
        self._unpack_rows(weight.address, rows.data_ptr(), rows.numel(), size, out.data_ptr(), threads)
        return out

    def plan_attention(
        self, spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device
    ) -> AttentionPlan:
        if layout.head_dim % LANES or layout.head_dim > MAX_HEAD_DIM:
            return torch_backend.plan_attention(spans, layout, num_heads, device)
        tokens = max(1, ROWS_PER_UNIT * layout.num_kv_heads // num_heads)
        table: list[int] = []
        rows = np.empty((len(spans), 4), dtype=np.int64)
        tiles: list[tuple[int, int, int, int]] = []  # work, span, first query, count
        for i, span in enumerate(spans):
            rows[i] = (span.row, span.num_rows, span.start, len(table))
            table.extend(span.block_table[: -(-span.length // layout.block_size)])
            for first in range(0, span.num_rows, tokens):
                count = min(tokens, span.num_rows - first)
                tiles.append((-(span.start + first + count) * count, i, first, count))
        tiles.sort()  # the longest first, so that threads end together
        heads = layout.num_kv_heads
        units = np.empty((len(tiles), heads, 4), dtype=np.int32)
        part = np.array(tiles, dtype=np.int64)
        units[:, :, 0], units[:, :, 2], units[:, :, 3] = part[:, 1:2], part[:, 2:3], part[:, 3:4]
        units[:, :, 1] = np.arange(heads, dtype=np.int32)
        shape = np.array((layout.num_layers, heads, layout.block_size, layout.head_dim, num_heads), dtype=np.int64)
        return NativePlan(rows, np.array(table, dtype=np.int32), units.reshape(-1, 4), shape)

    def paged_attention(
        self, q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, scale: float, window: int, softcap: float
    ) -> Tensor:
        if not isinstance(plan, NativePlan):
            return torch_backend.paged_attention(q, kv, layer, plan, scale, window, softcap)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        self._attend(
            TYPES[q.dtype],
            TYPES[kv.dtype],
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            kv.data_ptr(),
            plan.spans.ctypes.data,
            plan.tables.ctypes.data,
            plan.units.ctypes.data,
            plan.units.shape[0],
            plan.shape.ctypes.data,
            layer,
            window,
            scale,
            softcap,
            torch.get_num_threads(),
        )
        return out

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        layer: int,
        slots: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        _, num_layers, kv_heads, block_size, _, _ = kv.shape
        dim = head_dim_of(kv)
        if dim % LANES or dim > MAX_HEAD_DIM:
            return torch_backend.rotate_and_write(qkv, cos, sin, kv, layer, slots, q_norm, k_norm, eps)
        tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        q = torch.empty((tokens, heads, dim), dtype=qkv.dtype)
        shape = (ctypes.c_int64 * 5)(num_layers, kv_heads, block_size, dim, heads)
        self._rotate(
            TYPES[qkv.dtype],
            TYPES[kv.dtype],
            qkv.data_ptr(),
            q.data_ptr(),
            kv.data_ptr(),
            ctypes.addressof(shape),
            layer,
            slots.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            tokens,
            torch.get_num_threads(),
        )
        return q

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        if width % LANES:
            return torch_backend.rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._norm(
            *(TYPES[x.dtype], x.data_ptr(), None, None, weight.data_ptr(), out.data_ptr()),
            *(x.numel() // width, width, eps, torch.get_num_threads()),
        )
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        if width % LANES:
            return torch_backend.add_rms_norm(x, delta, weight, eps)
        x, delta = x.contiguous(), delta.contiguous()
        total, out = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        self._norm(
            *(TYPES[x.dtype], x.data_ptr(), delta.data_ptr(), total.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(x.numel() // width, width, eps, torch.get_num_threads()),
        )
        return total, out

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % LANES:
            return torch_backend.gated(gate_up, activation)
        gate_up = gate_up.contiguous()
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        self._gated(
            *(TYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, width),
            *(activation == "gelu_tanh", torch.get_num_threads()),
        )
        return out


@functools.cache
def native_backend() -> NativeBackend | None:
    """None where the library cannot be built."""
    library = load_native()
    if library is None:
        return None
    native = NativeBackend(library)
    log.info(
        "this CPU multiplies %s and %s",
        "pairs of bfloat16" if native.multiplies_bfloat16 else "no bfloat16 (oneDNN's products, float32 attention)",
        "int8 by fours" if native.multiplies_int8 else "int8 by way of wider numbers, which is slower",
    )
    return native


def share_cores(address: int, num_cores: int) -> None:
    """From now on long steps ask while they run how many of `num_cores` threads they may use.

    `address`: that of `CoreShare`'s bytes, which must stay mapped; 0 for nobody to share with.
    """
    native = native_backend()
    if native is not None:
        native.shared_cores = (address, num_cores)


def record(dtype: torch.dtype, forward: Callable[[Recorder], Tensor]) -> Program | None:
    """`forward`, which makes logits of a recorder's slots, as a program; None where it cannot be one."""
    native = native_backend()
    if native is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        recorder = Recorder(native, dtype)
        program = recorder.finish(forward(recorder))
    except NotRecordable as reason:
        log.warning("the model runs operation by operation, which is slower: %s", reason)
        return None
    log.info("a step is one native program of %d operations", program.num_ops)
    return program
