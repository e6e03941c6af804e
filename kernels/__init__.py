"""Tensor operations of models, dispatched by the device of their tensors.

    QuerySpan, KVLayout, plan_attention     attention plan of a step, shared by all layers
    StepPlan, fill_rows                     plan of a recorded step, whose rows are filled on the device
    rotate_and_write                        q/k norm, rotary embedding, new keys and values into the cache
    write_latents                           latents into the cache, and whole queries for attention over them
    HeadLinear                              per-head projections to and from latents
    paged_attention                         softmax(scale * q.k) v over the blocks of the cache
    sample                                  from logits to tokens, without leaving the device
    gather_blocks, scatter_blocks           KV blocks to and from a transfer buffer, in 8 bits if wanted
    block_sums                              checksums of KV blocks by their device
    rms_norm, add_rms_norm, gated           the element-wise steps between the matrix products
    Linear, GatedLinear, QuantisedWeight    matrix products with fixed weights, dense or of 8 to 4 bits
    LoraSite, LoraRows, LoraChange          LoRA adapters for such products
    route, Experts                          expert routing, and products grouped by expert
    Embedding                               table lookup; may share the packed table of a tied head
    record, ProgramRecorder, Program        a whole forward pass as one native call
    share_cores                             limits the threads of that call while other workers compute
    share_weights                           keeps one copy of the CPU's weights for all processes of a host

KV caches are `[num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), head_dim]`, contiguous, with 1 in place of 2
where they hold latents.

    interface   operations, their shapes and data types
    plain       plain torch for every device, used if there is nothing faster; `reference`: slow versions for tests
    cpu         C++ kernels from `native` that read blocks in place; shipped in wheels, or compiled at first use
    gpu         Triton kernels for CUDA devices
    agreement   comparison of a device's kernels with plain torch at the shapes of one model; not imported elsewhere

To add a backend, implement `backends.Backend` and select it in `backends.look_up`.
"""

from __future__ import annotations

from kernels.backends import has_device_kernels, has_own_kernels, prepare
from kernels.blocks import block_sums, gather_blocks, scatter_blocks, wire_bytes
from kernels.cpu.backend import share_cores
from kernels.cpu.native_plan import NativePlan
from kernels.cpu.program import Program
from kernels.cpu.recorder import ProgramRecorder, record
from kernels.cpu.shared_weights import share_weights
from kernels.device import on_device, too_large, usable_gpus
from kernels.dispatch import (
    add_rms_norm,
    fill_rows,
    gated,
    paged_attention,
    plan_attention,
    rms_norm,
    rotate_and_write,
    step_plan,
    write_latents,
)
from kernels.embedding import Embedding
from kernels.experts import Expert, Experts, add_gated, route
from kernels.head_linear import HeadLinear
from kernels.interface.attention_plan import AttentionPlan, KVLayout, QuerySpan, StepPlan
from kernels.interface.draws import Draw, SamplingTensors
from kernels.interface.host_copies import to_device, to_host
from kernels.interface.kernels import UNSCALED, AttentionRule, HeadNorms, Kernels, KVScales, LatentNorm
from kernels.interface.quantised_weight import QuantisedWeight, quantise, rounding_group, unified
from kernels.interface.routing import Routing
from kernels.linear import GatedLinear, Linear, Weight
from kernels.lora import NO_ADAPTER, LoraChange, LoraPart, LoraRows, LoraSite
from kernels.sampling import sample

__all__ = [
    "AttentionPlan",
    "AttentionRule",
    "Draw",
    "Embedding",
    "Expert",
    "Experts",
    "GatedLinear",
    "HeadLinear",
    "HeadNorms",
    "KVLayout",
    "KVScales",
    "Kernels",
    "LatentNorm",
    "Linear",
    "LoraChange",
    "LoraPart",
    "LoraRows",
    "LoraSite",
    "NO_ADAPTER",
    "NativePlan",
    "Program",
    "ProgramRecorder",
    "QuantisedWeight",
    "QuerySpan",
    "Routing",
    "SamplingTensors",
    "StepPlan",
    "UNSCALED",
    "Weight",
    "add_gated",
    "add_rms_norm",
    "block_sums",
    "fill_rows",
    "gated",
    "gather_blocks",
    "has_device_kernels",
    "has_own_kernels",
    "on_device",
    "paged_attention",
    "plan_attention",
    "prepare",
    "quantise",
    "record",
    "rms_norm",
    "rotate_and_write",
    "rounding_group",
    "route",
    "sample",
    "scatter_blocks",
    "share_cores",
    "share_weights",
    "step_plan",
    "to_device",
    "to_host",
    "too_large",
    "unified",
    "usable_gpus",
    "wire_bytes",
    "write_latents",
]
