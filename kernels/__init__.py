"""Tensors in, tensors out: the operations that models are made of, chosen by the device that the tensors are on.

    QuerySpan, KVLayout, plan_attention     once a step: what every layer's attention shares
    rotate_and_write                        q/k norm, rotary embedding, new keys and values into the cache
    paged_attention                         softmax(scale * q.k) v over the blocks of the cache
    rms_norm, add_rms_norm, gated           the element-wise steps between the matrix products
    Linear                                  a matrix product with fixed weights

KV caches are `[num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), head_dim]`, contiguous.

    native_backend   the CPU's: C++ that reads blocks in place, compiled at first use
    torch_backend    everywhere else, and where there is no compiler
    reference        slow and obvious, for tests

A backend for another device implements `Backend` and is named in `dispatch.backend`.
"""

from __future__ import annotations

from diptych.kernels.dispatch import (
    Backend,
    add_rms_norm,
    backend,
    gated,
    paged_attention,
    plan_attention,
    rms_norm,
    rotate_and_write,
)
from diptych.kernels.linear import Linear
from diptych.kernels.plan import AttentionPlan, KVLayout, QuerySpan

__all__ = [
    "AttentionPlan",
    "Backend",
    "KVLayout",
    "Linear",
    "QuerySpan",
    "add_rms_norm",
    "backend",
    "gated",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rotate_and_write",
]
