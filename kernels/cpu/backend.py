"""CPU backend: calls `native/` through ctypes, for float32 and bfloat16. Falls back to plain torch.

A row's result does not depend on the rest of the batch, on chunking, or on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.build import load_native
from kernels.cpu.native_plan import WIDTH_MULTIPLE, NativePlan, fits, native_plan
from kernels.cpu.packed import Q8, PackedWeight, panel_size, room
from kernels.cpu.structs import EPILOGUES, LoraStruct, OpStruct, RoutingStruct, StepStruct, check_layouts
from kernels.interface import (
    UNSCALED,
    AttentionPlan,
    AttentionRule,
    HeadNorms,
    KVLayout,
    KVScales,
    LatentNorm,
    QuerySpan,
    Routing,
    SamplingTensors,
    head_dim_of,
)
from kernels.plain import HostPlan
from kernels.plain import backend as plain

log = logging.getLogger("kernels")

INT8_DOTS, BF16_PAIRS, FP16_WIDENING = 1, 2, 4
"""Bits of `diptych_features`."""
TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int8: 3}
"""Activations have one of the first two types. A KV cache has the activations' type or one of the last two."""
OUTLIER_SHARE: Final = 512
"""Maximum share of outliers in the 12-bit format: one in OUTLIER_SHARE weights. More would be too slow."""


POINTER, INTEGER, NUMBER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES: Final = {
    "attend": (
        *(NUMBER, NUMBER, POINTER, INTEGER, POINTER, POINTER, POINTER, POINTER, POINTER, INTEGER, POINTER),
        *(INTEGER, INTEGER, FLOAT, FLOAT, POINTER, FLOAT, NUMBER),
    ),
    "rms_norm": (NUMBER, *(POINTER,) * 5, INTEGER, INTEGER, FLOAT, NUMBER),
    "rotate_and_write": (
        *(NUMBER, NUMBER, *(POINTER,) * 4, INTEGER, *(POINTER,) * 5, FLOAT, NUMBER, FLOAT, FLOAT, INTEGER, NUMBER),
    ),
    "gated": (NUMBER, POINTER, POINTER, INTEGER, INTEGER, NUMBER, NUMBER),
    "lora": (NUMBER, *(POINTER,) * 3, INTEGER, INTEGER, INTEGER, NUMBER, POINTER, NUMBER),
    "gate_panels": (NUMBER, POINTER, POINTER, INTEGER, INTEGER, NUMBER),
    "quantise": (NUMBER, POINTER, INTEGER, INTEGER, INTEGER, NUMBER, POINTER, POINTER, POINTER),
    "write_latents": (
        *(NUMBER, NUMBER, *(POINTER,) * 6, INTEGER, INTEGER, *(POINTER,) * 4, FLOAT, FLOAT, INTEGER, NUMBER),
    ),
    "head_linear": (POINTER, INTEGER, POINTER, INTEGER, INTEGER, NUMBER, POINTER, NUMBER),
    "route": (POINTER, INTEGER, INTEGER, POINTER, POINTER, POINTER, POINTER),
    "combine": (NUMBER, POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER, POINTER),
    "add_gated": (NUMBER, POINTER, POINTER, POINTER, INTEGER, INTEGER, POINTER),
    "linear": (*(POINTER,) * 4, INTEGER, NUMBER, POINTER, NUMBER, NUMBER),
    "choose_exponents": (POINTER, INTEGER, INTEGER, POINTER, POINTER, NUMBER),
    "pack_12bit": (POINTER, INTEGER, INTEGER, POINTER, POINTER, POINTER, NUMBER),
    "unpack_rows": (POINTER, POINTER, INTEGER, INTEGER, POINTER, NUMBER),
    "sample": (POINTER, POINTER, INTEGER, INTEGER, *(POINTER,) * 7, NUMBER),
    "run": (NUMBER, NUMBER, POINTER, INTEGER, POINTER, NUMBER),
    "read": (POINTER, INTEGER, NUMBER),
}
"""Arguments of the functions that `native/native.cpp` exports as diptych_NAME."""


class NativeBackend:
    """Implements `backends.Backend`: the operations, and the products with packed weights."""

    products: None = None
    fill_rows = staticmethod(plain.fill_rows)
    gather_blocks = staticmethod(plain.gather_blocks)
    scatter_blocks = staticmethod(plain.scatter_blocks)
    block_sums = staticmethod(plain.block_sums)

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layouts(library)
        for name, arguments in SIGNATURES.items():
            function = getattr(library, f"diptych_{name}")
            function.argtypes, function.restype = arguments, INTEGER if name == "read" else None
        self._library = library
        self.shared_cores = (0, 0)
        """Address of the bytes of `CoreShare` (0: none) and the number of shared cores. Applies to all later steps."""
        self.shared_view: ctypes.Array[ctypes.c_char] | None = None
        """Keeps these bytes mapped."""
        features = int(library.diptych_features())
        self.multiplies_bf16, self.multiplies_int8 = bool(features & BF16_PAIRS), bool(features & INT8_DOTS)
        self.widens_fp16 = bool(features & FP16_WIDENING)

    @property
    def packing(self) -> NativeBackend:
        return self

    def sample(
        self, logits: Tensor | Sequence[Tensor], draws: SamplingTensors, allowed: Sequence[Tensor | None]
    ) -> Tensor:
        """As `kernels.sample`, with one entry of `allowed` for each row."""
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
        self._library.diptych_sample(
            *(ctypes.addressof(places), ctypes.addressof(masks), count, width),
            *(*(column.data_ptr() for column in columns), out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def read(self, memory: Tensor) -> int:
        """Sum a contiguous tensor as int64 numbers, to measure the memory bandwidth."""
        return int(
            self._library.diptych_read(
                memory.data_ptr(), memory.numel() * memory.element_size(), torch.get_num_threads()
            )
        )

    def run(self, dtype: torch.dtype, kv_dtype: torch.dtype, ops: ctypes.Array[OpStruct], step: StepStruct) -> None:
        """Run a step of a recorded program."""
        place = ctypes.addressof(step)
        self._library.diptych_run(
            TYPES[dtype], TYPES[kv_dtype], ctypes.addressof(ops), len(ops), place, torch.get_num_threads()
        )

    def quantise(self, x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise x [T, in] for 8-bit or 4-bit weights: uint8 [T, in], and scales and sums float32 [T, groups]."""
        rows, groups = x.shape[0], weight.in_features // weight.group
        numbers = torch.empty(x.shape, dtype=torch.uint8)
        scale, total = torch.empty(rows, groups), torch.empty(rows, groups)
        self._library.diptych_quantise(
            *(TYPES[x.dtype], x.data_ptr(), rows, weight.in_features, weight.group, weight.format == Q8),
            *(numbers.data_ptr(), scale.data_ptr(), total.data_ptr()),
        )
        return numbers, scale, total

    def linear(self, x: Tensor, weight: PackedWeight, activation: str, wide: bool) -> Tensor:
        """Multiply x [T, in] by packed weights: [T, out], or [T, out / 2] if they are gated; float32 if `wide`."""
        x = x.contiguous()
        rows, width = x.shape[0], weight.out_features // 2 if activation else weight.out_features
        out = torch.empty((rows, width), dtype=torch.float32 if wide else x.dtype)
        inputs, scale, total = self.quantise(x, weight) if weight.quantised else (x, None, None)
        self._library.diptych_linear(
            *(weight.address, inputs.data_ptr(), _address(scale), _address(total)),
            *(rows, TYPES[out.dtype], out.data_ptr(), EPILOGUES[activation], torch.get_num_threads()),
        )
        return out

    def head_linear(self, x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
        """Implements `kernels.HeadLinear` for packed dense weights, one matrix per head."""
        x, heads = x.contiguous(), len(weights)
        out = torch.empty((x.shape[0], heads * weights[0].out_features), dtype=x.dtype)
        addresses = (ctypes.c_void_p * heads)(*(weight.address for weight in weights))
        self._library.diptych_head_linear(
            *(ctypes.addressof(addresses), heads, x.data_ptr(), x.shape[1] // heads, x.shape[0]),
            *(TYPES[x.dtype], out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Implements `kernels.route`. Among equal logits the first one wins."""
        logits = logits.contiguous()
        rows, experts = logits.shape
        chosen = torch.empty((rows, routing.per_token), dtype=torch.int32)
        shares = torch.empty((rows, routing.per_token))
        struct = RoutingStruct.of(routing)
        self._library.diptych_route(
            *(logits.data_ptr(), rows, experts, ctypes.addressof(struct), _address(routing.correction)),
            *(chosen.data_ptr(), shares.data_ptr()),
        )
        return chosen.long(), shares

    def combine(self, made: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        if made.shape[1] % WIDTH_MULTIPLE:
            return plain.combine(made, places, shares)
        (rows, per_token), places = places.shape, places.int()
        out = torch.empty((rows, made.shape[1]), dtype=made.dtype)
        self._library.diptych_combine(
            *(TYPES[made.dtype], made.data_ptr(), places.data_ptr(), shares.data_ptr(), rows, per_token),
            *(made.shape[1], out.data_ptr()),
        )
        return out

    def add_gated(self, x: Tensor, other: Tensor, gates: Tensor | None) -> Tensor:
        if x.shape[1] % WIDTH_MULTIPLE:
            return plain.add_gated(x, other, gates)
        out = torch.empty_like(x)  # contiguous, like x
        self._library.diptych_add_gated(
            *(TYPES[x.dtype], x.data_ptr(), other.data_ptr(), _address(gates), *x.shape, out.data_ptr())
        )
        return out

    def add_lora(self, x: Tensor, y: Tensor, adapters: Tensor, changes: ctypes.Array[LoraStruct], gated: bool) -> None:
        """Add the LoRA output of x [T, in] to y [T, out]. `adapters`: int64 [T], -1 for none. All are contiguous."""
        self._library.diptych_lora(
            *(TYPES[x.dtype], x.data_ptr(), adapters.data_ptr(), ctypes.addressof(changes), *x.shape, y.shape[1]),
            *(gated, y.data_ptr(), torch.get_num_threads()),
        )

    def gate_panels(self, x: Tensor, activation: str) -> Tensor:
        """Apply the gate to a product [T, 2 * n] with alternating panels of gates and ups. Returns [T, n]."""
        rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, width), dtype=x.dtype)
        epilogue = EPILOGUES[activation]
        self._library.diptych_gate_panels(TYPES[x.dtype], x.data_ptr(), out.data_ptr(), rows, width, epilogue)
        return out

    def pack_12bit(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Pack bf16 [whole panels, k] into 12 bits: data, exponents, outliers. None if there are too many outliers."""
        panels, columns, threads = rows.shape[0] // panel_size(), rows.shape[1], torch.get_num_threads()
        exponents, begins = room(panels * 32), torch.empty(panels + 1, dtype=torch.int64)
        self._library.diptych_choose_exponents(
            rows.data_ptr(), panels, columns, exponents.data_ptr(), begins.data_ptr(), threads
        )
        num_outliers = int(begins[-1])
        if num_outliers * OUTLIER_SHARE > rows.numel():
            return None
        data, outliers = room(rows.numel() * 3 // 2), torch.cat((begins, begins.new_zeros(num_outliers)))
        places = (exponents.data_ptr(), data.data_ptr(), outliers.data_ptr())
        self._library.diptych_pack_12bit(rows.data_ptr(), panels, columns, *places, threads)
        return data, exponents, outliers

    def unpack_rows(self, weight: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of dense weights, [T, in] in `dtype`. `rows`: their positions in the panels, int64 [T]."""
        rows = rows.contiguous()
        out = torch.empty((rows.numel(), weight.in_features), dtype=dtype)
        size, threads = weight.in_features * dtype.itemsize, torch.get_num_threads()
        self._library.diptych_unpack_rows(weight.address, rows.data_ptr(), rows.numel(), size, out.data_ptr(), threads)
        return out

    def plan_attention(
        self, spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device
    ) -> AttentionPlan:
        if not fits(layout.head_dim, layout.latent_dim):
            return plain.plan_attention(spans, layout, num_heads, device)
        return native_plan(spans, layout, num_heads)

    def step_plan(
        self, num_rows: int, max_blocks: int, layout: KVLayout, num_heads: int, device: torch.device
    ) -> HostPlan:
        return HostPlan(self.plan_attention, num_rows, max_blocks, layout, num_heads, device)

    def paged_attention(self, q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
        if not isinstance(plan, NativePlan):
            return plain.paged_attention(q, kv, layer, plan, rule)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty((*q.shape[:2], rule.latent_dim or q.shape[2]), dtype=q.dtype)
        self._library.diptych_attend(
            *(TYPES[q.dtype], TYPES[kv.dtype], q.data_ptr(), q.stride(0), out.data_ptr(), kv.data_ptr()),
            *(plan.spans.ctypes.data, plan.tables.ctypes.data, plan.units.ctypes.data, plan.units.shape[0]),
            *(plan.shape.ctypes.data, layer, rule.window, rule.scale * rule.k_scale, rule.softcap),
            *(_address(rule.sinks), rule.v_scale, torch.get_num_threads()),
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
        norms: HeadNorms | None,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        _, num_layers, kv_heads, block_size, _, _ = kv.shape
        dim = head_dim_of(kv)
        if not fits(dim):
            return plain.rotate_and_write(qkv, cos, sin, kv, layer, slots, norms, scales)
        tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        q = torch.empty((tokens, heads, dim), dtype=qkv.dtype)
        shape = (ctypes.c_int64 * 7)(num_layers, kv_heads, block_size, dim, heads, 0, kv_heads)
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        self._library.diptych_rotate_and_write(
            *(TYPES[qkv.dtype], TYPES[kv.dtype], qkv.data_ptr(), q.data_ptr(), kv.data_ptr()),
            *(ctypes.addressof(shape), layer, slots.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(_address(q_norm), _address(k_norm), eps, q_norm is not None and len(q_norm) > dim),
            *(*scales, tokens, torch.get_num_threads()),
        )
        return q

    def write_latents(
        self,
        q: Tensor,
        absorbed: Tensor,
        latents: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        layer: int,
        slots: Tensor,
        norm: LatentNorm,
        scale: float = 1.0,
    ) -> Tensor:
        _, num_layers, kv_heads, block_size, _, dim = kv.shape
        tokens, rank = latents.shape[0], dim - 2 * cos.shape[1]
        if not fits(dim, rank):
            return plain.write_latents(q, absorbed, latents, cos, sin, kv, layer, slots, norm, scale)
        q, absorbed, latents = q.contiguous(), absorbed.contiguous(), latents.contiguous()
        heads = absorbed.shape[1] // rank
        queries = torch.empty((tokens, heads, dim), dtype=q.dtype)
        shape = (ctypes.c_int64 * 7)(num_layers, kv_heads, block_size, dim, heads, rank, kv_heads)
        cos, sin = cos.contiguous(), sin.contiguous()
        self._library.diptych_write_latents(
            *(TYPES[q.dtype], TYPES[kv.dtype], q.data_ptr(), absorbed.data_ptr(), latents.data_ptr()),
            *(queries.data_ptr(), kv.data_ptr(), ctypes.addressof(shape), q.shape[1] // heads, layer),
            *(slots.data_ptr(), cos.data_ptr(), sin.data_ptr(), norm.weight.data_ptr(), norm.eps),
            *(scale, tokens, torch.get_num_threads()),
        )
        return queries

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        if width % WIDTH_MULTIPLE:
            return plain.rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._library.diptych_rms_norm(
            *(TYPES[x.dtype], x.data_ptr(), None, None, weight.data_ptr(), out.data_ptr()),
            *(x.numel() // width, width, eps, torch.get_num_threads()),
        )
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        if width % WIDTH_MULTIPLE:
            return plain.add_rms_norm(x, delta, weight, eps)
        x, delta = x.contiguous(), delta.contiguous()
        total, out = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        self._library.diptych_rms_norm(
            *(TYPES[x.dtype], x.data_ptr(), delta.data_ptr(), total.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(x.numel() // width, width, eps, torch.get_num_threads()),
        )
        return total, out

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % WIDTH_MULTIPLE:
            return plain.gated(gate_up, activation)
        gate_up = gate_up.contiguous()
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        self._library.diptych_gated(
            *(TYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, width),
            *(EPILOGUES[activation], torch.get_num_threads()),
        )
        return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def native_backend() -> NativeBackend | None:
    """Return the CPU backend, or None if the library cannot be built."""
    library = load_native()
    if library is None:
        return None
    native = NativeBackend(library)
    log.info(
        "CPU dot-product instructions: bfloat16 %s, int8 %s",
        "yes" if native.multiplies_bf16 else "no (oneDNN matrix products, float32 attention)",
        "yes" if native.multiplies_int8 else "no (wider integers, slower)",
    )
    return native


def share_cores(view: ctypes.Array[ctypes.c_char] | None, num_cores: int) -> None:
    """Let long steps check, while they run, how many of `num_cores` threads they may use. No step may be running.

    `view`: bytes of `CoreShare`, which stay mapped until the next call, because the warm-up of other weights reads them
    after their engine has ended. None disables sharing with other workers.
    """
    native = native_backend()
    if native is not None:
        native.shared_cores = (0 if view is None else ctypes.addressof(view), num_cores)
        native.shared_view = view
