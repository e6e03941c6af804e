"""Implements the operations of `interface.kernels` for a recorder's slots: each appends itself to the program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NoReturn, cast

import torch
from torch import Tensor

from kernels.cpu.native_plan import MAX_HEAD_DIM, WIDTH_MULTIPLE
from kernels.cpu.recorder import NotRecordable, RopeSlot, slot_of
from kernels.cpu.structs import ALL_ROWS, ATTEND, LATENTS, NORM, ROTATE
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
    SeatLayout,
    StepRows,
    head_dim_of,
)


class RecordedKernels:
    """Implements `backends.Backend` for slots: each operation appends itself to its slot's recorder."""

    packing: None = None
    products: None = None

    def plan_attention(
        self, spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device
    ) -> NoReturn:
        raise NotRecordable("a plan belongs to one step")

    def step_plan(
        self, num_rows: int, max_blocks: int, layout: KVLayout, num_heads: int, device: torch.device
    ) -> NoReturn:
        raise NotRecordable("a plan belongs to one step")

    def fill_rows(
        self, memory: Tensor, layout: SeatLayout, sampled: Tensor, vocab_size: int, rows: StepRows
    ) -> NoReturn:
        raise NotRecordable("seats belong to a worker")

    def paged_attention(self, q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
        source = slot_of(q)
        if head_dim_of(kv) > MAX_HEAD_DIM:
            raise NotRecordable(f"heads of more than {MAX_HEAD_DIM} elements")
        heads = source.width // head_dim_of(kv)
        out = source.recorder.slot(heads * rule.latent_dim if rule.latent_dim else source.width, ALL_ROWS)
        return source.recorder.add(
            ATTEND,
            out,
            input=source,
            weights=(rule.sinks,),
            layer=layer,
            window=rule.window,
            scale=rule.scale * rule.k_scale,
            eps=rule.softcap,
            value_scale=rule.v_scale,
        )

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
        source = slot_of(qkv)
        recorder = source.recorder
        if kv.dtype not in (recorder.dtype, torch.float8_e4m3fn, torch.int8):
            raise NotRecordable(f"a KV cache of {kv.dtype}")
        dim, kv_heads = head_dim_of(kv), kv.shape[2]
        if dim % WIDTH_MULTIPLE:
            raise NotRecordable(f"head size {dim} is no multiple of {WIDTH_MULTIPLE}")
        out = recorder.slot(source.width - 2 * kv_heads * dim, ALL_ROWS)
        pointers: object = None
        if norms is not None:
            pointers = (ctypes.c_void_p * 2)(norms.query.data_ptr(), norms.key.data_ptr())
            recorder.keep(norms)
        tables = (cast(RopeSlot, cos).table, cast(RopeSlot, sin).table, pointers)
        eps = norms.eps if norms is not None else 0.0
        flags = int(norms is not None and len(norms.query) > dim)
        return recorder.add(
            ROTATE,
            out,
            input=source,
            width=source.width,
            layer=layer,
            weights=tables,
            eps=eps,
            flags=flags,
            scale=scales.key,
            value_scale=scales.value,
        )

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
        source, parts = slot_of(q), slot_of(absorbed)
        recorder, tables = source.recorder, (cast(RopeSlot, cos).table, cast(RopeSlot, sin).table)
        if kv.dtype not in (recorder.dtype, torch.float8_e4m3fn):
            raise NotRecordable(f"a cache of latents in {kv.dtype}")
        dim = head_dim_of(kv)
        rank = dim - 2 * tables[0].shape[1]
        if dim % WIDTH_MULTIPLE or rank % WIDTH_MULTIPLE:
            raise NotRecordable(f"latents of {rank} and {dim - rank} numbers are no multiples of {WIDTH_MULTIPLE}")
        heads = parts.width // rank
        out = recorder.slot(heads * dim, ALL_ROWS)
        return recorder.add(
            LATENTS,
            out,
            input=source,
            extra=parts,
            extra2=slot_of(latents),
            width=out.width,
            layer=layer,
            weights=(*tables, norm.weight),
            eps=norm.eps,
            scale=scale,
            per_token=source.width // heads,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        source = slot_of(x)
        out = source.recorder.slot(source.width, source.rows)
        return source.recorder.add(NORM, out, input=source, weights=(weight,), eps=eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        source, change = slot_of(x), slot_of(delta)
        total, out = (source.recorder.slot(source.width, source.rows) for _ in range(2))
        source.recorder.add(NORM, out, input=source, extra=change, extra2=total, weights=(weight,), eps=eps)
        return cast(Tensor, total), cast(Tensor, out)

    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return slot_of(logits).recorder.route(logits, routing)

    def add_gated(self, x: Tensor, other: Tensor, gates: Tensor | None) -> Tensor:
        return slot_of(x).recorder.add_gated(x, other, gates)

    def combine(self, made: Tensor, places: Tensor, shares: Tensor) -> NoReturn:
        raise NotRecordable("experts are one operation here: see Experts")

    def sample(
        self, logits: Tensor | Sequence[Tensor], rows: SamplingTensors, allowed: Sequence[Tensor | None]
    ) -> NoReturn:
        raise NotRecordable("a program ends with logits")

    def gather_blocks(self, kv: Tensor, block_ids: Tensor, buffer: Tensor, quantised: bool) -> NoReturn:
        raise NotRecordable("blocks are no part of a step")

    def scatter_blocks(self, buffer: Tensor, kv: Tensor, block_ids: Tensor, quantised: bool) -> NoReturn:
        raise NotRecordable("blocks are no part of a step")

    def block_sums(self, kv: Tensor, block_ids: Tensor, out: Tensor) -> NoReturn:
        raise NotRecordable("blocks are no part of a step")

    def gated(self, gate_up: Tensor, activation: str) -> NoReturn:
        raise NotRecordable("gate and up are one product here: see GatedLinear")
