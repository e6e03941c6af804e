"""The public operations, each sent to the backend of the device that its tensors are on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels import torch_backend
from kernels.attention_plan import AttentionPlan, KVLayout, QuerySpan
from kernels.device import triton_backend
from kernels.kv_region import head_dim_of
from kernels.native_backend import NativePlan, native_backend
from kernels.program import Recording


class Backend(Protocol):
    """What a device's implementation offers; shapes and errors are those of the functions below."""

    def plan_attention(
        self, spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device
    ) -> AttentionPlan: ...

    def paged_attention(
        self, q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, scale: float, window: int, softcap: float
    ) -> Tensor: ...

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
    ) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor: ...


class FullAttention(Protocol):
    """A backend whose attention knows sinks and the scales of a cache of e4m3."""

    def paged_attention(
        self, q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, scale: float, window: int, softcap: float,
        *, sinks: Tensor | None, k_scale: float, v_scale: float,
    ) -> Tensor: ...  # fmt: skip


@functools.cache
def backend(kind: str) -> Backend:
    """The backend of a device type: native kernels on "cpu", Triton's on "cuda", where they can be had, else torch."""
    if kind == "program":
        return cast(Backend, Recording())
    if kind == "cpu" and (native := native_backend()) is not None:
        return native
    return cast(Backend, triton_backend(kind) or torch_backend)


def plan_attention(spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device) -> AttentionPlan:
    """What all layers' attention of one step shares. Spans must not overlap; their block tables must be long enough."""
    return backend(device.type).plan_attention(spans, layout, num_heads, device)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Causal attention of q [T, num_heads, head_dim] over the blocks of `layer` in kv: [T, num_heads, head_dim].

    Scores are q.k * scale, then softcap * tanh(scores / softcap) when `softcap` > 0. Query head h reads KV head
    h // (num_heads // num_kv_heads). `window` > 0 lets a query see that many tokens, itself included. `sinks` (float32
    [num_heads]) are one more logit a head in the softmax's denominator. A cache of float8_e4m3fn holds keys divided by
    `k_scale` and values divided by `v_scale`; one of int8, on a CPU alone, has a scale of its own for each of them (see
    `kv_region`). Rows outside of the plan's spans stay unwritten. The spans' own keys and
    values must have been written.
    """
    chosen = backend(q.device.type)
    if sinks is None and k_scale == v_scale == 1.0:
        return chosen.paged_attention(q, kv, layer, plan, scale, window, softcap)
    if isinstance(plan, NativePlan):
        chosen, plan = cast(Backend, torch_backend), _torch_plan(plan, kv)
    full = cast(FullAttention, chosen)
    return full.paged_attention(
        q, kv, layer, plan, scale, window, softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale
    )


def _torch_plan(plan: NativePlan, kv: Tensor) -> AttentionPlan:
    """For what the native kernels do not know."""
    tables = plan.tables.tolist()
    spans = [QuerySpan(row, rows, start, tables[first:]) for row, rows, start, first in plan.spans.tolist()]
    num_blocks, num_layers, kv_heads, block_size = kv.shape[:4]
    layout = KVLayout(num_blocks, num_layers, kv_heads, block_size, head_dim_of(kv))
    return torch_backend.plan_attention(spans, layout, int(plan.shape[4]), kv.device)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """From a projection to attention's inputs: the rotated queries, with rotated keys and values put into the cache.

    qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]; cos and sin float32 [T, head_dim / 2] turn element i with
    element i + head_dim / 2; slots int64 [T] are block * block_size + offset. With `q_norm` and `k_norm` (float32
    [head_dim]) each head is RMS-normalised first. A cache of float8_e4m3fn takes keys and values to the nearest, at
    most 448, one of int8 to the nearest of 255 multiples of a scale for each; NaN stays NaN. Returns q [T, num_heads,
    head_dim].
    """
    return backend(qkv.device.type).rotate_and_write(qkv, cos, sin, kv, layer, slots, q_norm, k_norm, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: float32 inside, as `weight` is, x's dtype outside."""
    return backend(x.device.type).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, rms_norm(x + delta)): the residual and the next block's input, of one pass."""
    return backend(x.device.type).add_rms_norm(x, delta, weight, eps)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of [T, 2 * n], gate first: [T, n]. `activation` is "silu" or "gelu_tanh"."""
    return backend(gate_up.device.type).gated(gate_up, activation)
