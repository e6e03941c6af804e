"""Cases of attention over latents with DeepSeek V3's sizes: decode steps over long contexts, and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.attention import copies
from benchmarks.gpu.case import KernelCase, MakeCase
from benchmarks.gpu.gate import difference
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Call
from kernels import AttentionRule, KVLayout, QuerySpan
from kernels.plain import backend as torch_backend


def latent_cases(backend: Any, shape: GPUShape, device: torch.device) -> Iterator[MakeCase]:
    """Yield decode steps of one sequence and of a batch, and the shortest prompt."""
    context = shape.decode_context
    for batch in (1, max(shape.decode_batches)):
        yield partial(latent_case, backend, shape, "latent decode", batch, 1, context - 1, device)
    yield partial(latent_case, backend, shape, "latent prefill", 1, min(shape.prefill_lengths), 0, device)


def latent_case(
    backend: Any, shape: GPUShape, name: str, batch: int, rows: int, start: int, device: torch.device
) -> KernelCase:
    """Case of `batch` sequences of `rows` tokens that follow `start` tokens. The cache has one latent per token."""
    heads, rank, rope = shape.latent_sizes
    dim, length, size = rank + rope, rows + start, shape.block_size
    needed = -(-length // size)
    num_keys = batch * (rows * start + rows * (rows + 1) // 2)
    num_bytes = (batch * length * dim + batch * rows * heads * (dim + rank)) * shape.dtype.itemsize
    layers = copies(num_bytes, shape.rotate_bytes)
    layout = KVLayout(batch * needed + 1, layers, 1, size, dim, rank)
    tables = (torch.randperm(batch * needed) + 1).view(batch, needed)
    spans = [QuerySpan(i * rows, rows, start, [*tables[i].tolist(), 0]) for i in range(batch)]
    kv = torch.randn(layout.num_blocks, layers, 1, size, 1, dim, device=device).to(shape.dtype)
    q = torch.randn(layers, batch * rows, heads, dim, device=device).to(shape.dtype)
    rule = AttentionRule(dim**-0.5, latent_dim=rank)
    plan = backend.plan_attention(spans, layout, heads, device)

    def check() -> str:
        plain = torch_backend.plan_attention(spans, layout._replace(num_layers=1), heads, device)
        wide = kv[:, :1].float().contiguous()
        expected = torch_backend.paged_attention(q[0].float(), wide, 0, plain, rule)
        return difference(backend.paged_attention(q[0], kv, 0, plan, rule), expected, shape.dtype)

    def sdpa() -> list[Call]:
        """torch's attention over contiguous latents, which all heads share."""

        def call(layer: int) -> Call:
            keys = kv[tables.to(device), layer].flatten(1, 4).view(batch, 1, needed * size, dim)[:, :, :length]
            keys = keys.contiguous()
            query = q[layer].view(batch, rows, heads, dim).transpose(1, 2).contiguous()
            values = keys[..., :rank].contiguous()
            causal = rows > 1
            return lambda: functional.scaled_dot_product_attention(
                query, keys, values, is_causal=causal, scale=rule.scale, enable_gqa=True
            )

        return [call(layer) for layer in range(layers)]

    calls: list[Call] = [
        lambda layer=layer: backend.paged_attention(q[layer], kv, layer, plan, rule)  # type: ignore[misc]
        for layer in range(layers)
    ]
    words = f"{batch} x {length:,}, {heads} heads"
    num_flops = 2 * num_keys * heads * (dim + rank)
    return KernelCase(name, words, num_bytes, num_flops, calls, check, {"torch sdpa": sdpa})
