"""The public operations, each sent to the backend of the device that its tensors are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from diptych.kernels import torch_backend
from diptych.kernels.plan import AttentionPlan, KVLayout, QuerySpan


class Backend(Protocol):
    """What a device's implementation offers; shapes and errors are those of the functions below."""

    def plan_attention(
        self, spans: Sequence[QuerySpan], layout: KVLayout, window: int, num_heads: int, device: torch.device
    ) -> AttentionPlan: ...

    def paged_attention(
        self, q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, scale: float, softcap: float
    ) -> Tensor: ...

    def write_kv(self, kv: Tensor, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor: ...


def backend(device: torch.device) -> Backend:
    """The backend for a device. Every device is served by torch until it has one of its own."""
    return cast(Backend, torch_backend)


def plan_attention(
    spans: Sequence[QuerySpan], layout: KVLayout, window: int, num_heads: int, device: torch.device
) -> AttentionPlan:
    """Index tensors for one step. `window` > 0 lets a query see that many tokens, itself included; 0 lets it see all."""
    return backend(device).plan_attention(spans, layout, window, num_heads, device)


def paged_attention(
    q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, *, scale: float, softcap: float = 0.0
) -> Tensor:
    """Causal attention of q [T, num_heads, head_dim] over the blocks of `layer` in kv: [T, num_heads, head_dim].

    Scores are q.k * scale, then softcap * tanh(scores / softcap) when `softcap` > 0. Query head h reads KV head
    h // (num_heads // num_kv_heads). The spans' own keys and values must have been written.
    """
    return backend(q.device).paged_attention(q, kv, layer, plan, scale, softcap)


def write_kv(kv: Tensor, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [T, num_kv_heads, head_dim] to `slots` (int64 [T], block * block_size + offset) of one layer."""
    backend(kv.device).write_kv(kv, layer, slots, k, v)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside, in x's dtype outside."""
    return backend(x.device).rms_norm(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim] by cos and sin [T, head_dim / 2], halves rotated (not interleaved)."""
    return backend(x.device).rotate(x, cos, sin)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of [T, 2 * n], gate first: [T, n]. `activation` is "silu" or "gelu_tanh"."""
    return backend(gate_up.device).gated(gate_up, activation)
