"""Public operations, dispatched to the backend of their tensors' device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backends import backend
from kernels.interface.attention_plan import AttentionPlan, KVLayout, QuerySpan, StepPlan
from kernels.interface.kernels import AttentionRule, HeadNorms, KVScales, LatentNorm
from kernels.interface.seats import SeatLayout, StepRows


def plan_attention(spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device) -> AttentionPlan:
    """See `Kernels.plan_attention`."""
    return backend(device.type).plan_attention(spans, layout, num_heads, device)


def step_plan(num_rows: int, max_blocks: int, layout: KVLayout, num_heads: int, device: torch.device) -> StepPlan:
    """See `Kernels.step_plan`."""
    return backend(device.type).step_plan(num_rows, max_blocks, layout, num_heads, device)


def fill_rows(memory: Tensor, layout: SeatLayout, sampled: Tensor, vocab_size: int, rows: StepRows) -> None:
    """See `Kernels.fill_rows`."""
    backend(memory.device.type).fill_rows(memory, layout, sampled, vocab_size, rows)


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
    latent_dim: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """See `Kernels.paged_attention` and `AttentionRule`."""
    rule = AttentionRule(scale, window, softcap, sinks, k_scale, v_scale, latent_dim, batch_invariant)
    return backend(q.device.type).paged_attention(q, kv, layer, plan, rule)


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """See `Kernels.rotate_and_write`; the heads are normalised with both norms or with none."""
    norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, eps)
    scales = KVScales(k_scale, v_scale)
    return backend(qkv.device.type).rotate_and_write(qkv, cos, sin, kv, layer, slots, norms, scales)


def write_latents(
    q: Tensor,
    absorbed: Tensor,
    latents: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    *,
    norm: Tensor,
    eps: float,
    k_scale: float = 1.0,
) -> Tensor:
    """See `Kernels.write_latents`."""
    kernel = backend(q.device.type).write_latents
    return kernel(q, absorbed, latents, cos, sin, kv, layer, slots, LatentNorm(norm, eps), k_scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    return backend(x.device.type).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Kernels.add_rms_norm`."""
    return backend(x.device.type).add_rms_norm(x, delta, weight, eps)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """See `Kernels.gated`."""
    return backend(gate_up.device.type).gated(gate_up, activation)
