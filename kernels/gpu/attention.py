"""Attention of a step: single rows use the decode kernel, spans of several rows use the prefill kernel.

Latent attention has separate kernels for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.device_plan import GPUPlan
from kernels.gpu.latent_attention import latent_attention
from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.scores import Scores
from kernels.interface import AttentionPlan, AttentionRule, KVLayout, QuerySpan


def plan_attention(spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device) -> GPUPlan:
    """Implement `Kernels.plan_attention` with a plan sized for these spans."""
    return GPUPlan.sized_for(spans, layout, num_heads, device)


def step_plan(num_rows: int, max_blocks: int, layout: KVLayout, num_heads: int, device: torch.device) -> GPUPlan:
    """As `Kernels.step_plan`."""
    return GPUPlan.empty(num_rows, max_blocks, layout, num_heads, device)


def paged_attention(q: Tensor, kv: Tensor, layer: int, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
    """As `Kernels.paged_attention`. q may be a slice whose last dimension is contiguous."""
    if not isinstance(plan, GPUPlan):
        raise TypeError(f"a {type(plan).__name__} was made by another backend")
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((*q.shape[:2], rule.latent_dim or q.shape[2]), dtype=q.dtype, device=q.device)
    scores, split = Scores.of(kv, rule), not rule.batch_invariant
    if rule.latent_dim:
        latent_attention(q, kv, layer, plan, scores, out, split=split)
        return out
    if plan.single and plan.num_spans:
        decode_attention(q, kv, layer, plan, scores, out)
    if plan.wide:
        prefill_attention(q, kv, layer, plan, scores, out, split=split)
    return out
