"""Tensors in, tensors out: the operations that models are made of, chosen by the device that the tensors are on.

    QuerySpan, KVLayout          what an attention plan is made from
    plan_attention(...)          once a step and window: index tensors that every layer shares
    paged_attention(...)         softmax(scale * q.k) v over the blocks of the cache
    write_kv(...)                new keys and values into their slots
    rms_norm, rotate, gated      the element-wise operations between the matrix products

KV caches are `[num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), head_dim]`, contiguous. The torch path runs
anywhere and is the CPU's; a backend for another device offers the same names as `kernels.torch_backend`.
"""

from __future__ import annotations

from diptych.kernels.dispatch import (
    Backend,
    backend,
    gated,
    paged_attention,
    plan_attention,
    rms_norm,
    rotate,
    write_kv,
)
from diptych.kernels.plan import AttentionPlan, KVLayout, QuerySpan

__all__ = [
    "AttentionPlan",
    "Backend",
    "KVLayout",
    "QuerySpan",
    "backend",
    "gated",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rotate",
    "write_kv",
]
