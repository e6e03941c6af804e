"""Tensors in, tensors out: the operations that models are made of, chosen by the device that the tensors are on.

    QuerySpan, KVLayout, plan_attention     once a step: what every layer's attention shares
    rotate_and_write                        q/k norm, rotary embedding, new keys and values into the cache
    paged_attention                         softmax(scale * q.k) v over the blocks of the cache
    sample                                  from logits to tokens, without leaving the device
    gather_blocks, scatter_blocks           KV blocks to and from a transfer buffer, in 8 bits if wanted
    rms_norm, add_rms_norm, gated           the element-wise steps between the matrix products
    Linear, GatedLinear, QuantisedWeight    matrix products with fixed weights, dense or of 8- or 4-bit codes
    Embedding                               rows of a table, which the head of a tied model may hold
    record, Recorder, Program               a whole forward pass as one native call
    share_cores                             how many threads that call may use while others compute too

KV caches are `[num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), head_dim]`, contiguous.

    native_backend   the CPU's: C++ that reads blocks in place, compiled at first use
    gpu.backend      the CUDA device's: Triton kernels
    torch_backend    everywhere else, and where there is no compiler
    reference        slow and obvious, for tests

A backend for another device implements `Backend` and is named in `dispatch.backend`.
"""

from __future__ import annotations

from kernels.attention_plan import AttentionPlan, KVLayout, QuerySpan
from kernels.blocks import gather_blocks, scatter_blocks, wire_bytes
from kernels.device import on_device
from kernels.dispatch import (
    Backend,
    add_rms_norm,
    backend,
    gated,
    paged_attention,
    plan_attention,
    rms_norm,
    rotate_and_write,
)
from kernels.embedding import Embedding
from kernels.linear import GatedLinear, Linear, Weight
from kernels.native_backend import NativePlan, record, share_cores
from kernels.program import Program, Recorder
from kernels.quantised import QuantisedWeight, quantise, stack
from kernels.sampling import Draw, SamplingTensors, bits_allowed, sample

__all__ = [
    "AttentionPlan",
    "Backend",
    "Draw",
    "Embedding",
    "GatedLinear",
    "KVLayout",
    "Linear",
    "NativePlan",
    "Program",
    "QuantisedWeight",
    "QuerySpan",
    "Recorder",
    "SamplingTensors",
    "Weight",
    "add_rms_norm",
    "backend",
    "bits_allowed",
    "gated",
    "gather_blocks",
    "on_device",
    "paged_attention",
    "plan_attention",
    "quantise",
    "record",
    "rms_norm",
    "rotate_and_write",
    "sample",
    "scatter_blocks",
    "share_cores",
    "stack",
    "wire_bytes",
]
