"""Attention's cases: decode steps over long contexts and prefills, a Llama's heads, beside torch's and FlashInfer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.case import KernelCase
from benchmarks.gpu.gate import difference
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Call
from kernels import AttentionRule, KVLayout, QuerySpan
from kernels.plain import backend as torch_backend
from kernels.plain import reference

LEAST_COPIES, MAX_COPIES = 4, 32
AWKWARD = ((1, 1328), (5, 18), (129, 463), (1, 0), (1, 63), (1, 64), (2, 511))
"""(tokens in this step, tokens before it) of sequences that have broken other kernels."""
AWKWARD_WINDOWS = (0, 100)
SHORT_AWKWARD = ((1, 40), (5, 18), (1, 0), (17, 3))
SHORT_WINDOWS = (0, 7)
SOFTCAPS = (0.0, 20.0)


class PagedInputs:
    """Sequences in a cache of `num_layers` layers, one a call; unused slots and blocks are NaN.

    kv [blocks, num_layers, kv heads, block size, 2, D]; q [num_layers, T, heads, D].
    """

    def __init__(
        self, shape: GPUShape, sizes: Sequence[tuple[int, int]], num_layers: int, device: torch.device
    ) -> None:
        block = shape.block_size
        needed = [-(-(count + start) // block) for count, start in sizes]
        total = sum(needed) + 1
        free = (torch.randperm(total - 1) + 1).tolist()  # no sequence owns block 0
        self.layout = shape.layout(total, num_layers)
        self.kv = torch.randn(total, num_layers, shape.num_kv_heads, block, 2, shape.head_dim, device=device).to(
            shape.dtype
        )
        self.kv[0] = float("nan")
        self.spans: list[QuerySpan] = []
        rows = 0
        for (count, start), blocks in zip(sizes, needed, strict=True):
            table = [free.pop() for _ in range(blocks)]
            used = (count + start) % block
            if used:
                self.kv[table[-1], :, :, used:] = float("nan")
            self.spans.append(QuerySpan(rows, count, start, [*table, 0]))
            rows += count
        self.q = torch.randn(num_layers, rows, shape.num_heads, shape.head_dim, device=device).to(shape.dtype)
        self.scale = shape.head_dim**-0.5
        self.num_heads, self.device = shape.num_heads, device

    def contiguous(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, kv heads, L, D] of sequences of one length, in the peers' layout."""
        tables = torch.tensor([span.block_table[:-1] for span in self.spans], device=self.device)
        both = self.kv[tables, layer].transpose(1, 2).flatten(2, 3)[:, :, : self.spans[0].length]
        return both[..., 0, :].contiguous(), both[..., 1, :].contiguous()


def copies(bytes_each: float, rotate_bytes: int) -> int:
    """The number of inputs of a case, such that none is cached at its turn and the gap between rounds is small."""
    return max(LEAST_COPIES, min(MAX_COPIES, math.ceil(rotate_bytes / bytes_each)))


def decode_case(backend: Any, shape: GPUShape, batch: int, device: torch.device) -> KernelCase:
    """`batch` sequences of `decode_context` tokens, one new token each."""
    context = shape.decode_context
    num_bytes = batch * (context * shape.token_bytes + 2 * shape.num_heads * shape.head_dim * shape.dtype.itemsize)
    inputs = PagedInputs(shape, [(1, context - 1)] * batch, copies(num_bytes, shape.rotate_bytes), device)
    return KernelCase(
        "decode attention",
        f"{batch} x {context:,}",
        num_bytes,
        4 * batch * context * shape.num_heads * shape.head_dim,
        _paged_calls(backend, inputs),
        lambda: _matches_torch(backend, inputs, shape.dtype),
        {
            "torch sdpa": lambda: _sdpa_calls(inputs, causal=False),
            "cuDNN sdpa": lambda: _cudnn_calls(inputs, causal=False),
            "varlen_attn": lambda: _varlen_calls(inputs, causal=False),
            "flashinfer": lambda: _flashinfer_decode(inputs, shape),
            "fa3": lambda: _fa3_decode(inputs),
        },
    )


def prefill_case(backend: Any, shape: GPUShape, length: int, device: torch.device) -> KernelCase:
    """A prompt of `length` tokens in one step."""
    num_bytes = length * (shape.token_bytes + 2 * shape.num_heads * shape.head_dim * shape.dtype.itemsize)
    inputs = PagedInputs(shape, [(length, 0)], copies(num_bytes, shape.rotate_bytes // 4), device)
    return KernelCase(
        "prefill attention",
        f"{length:,}",
        num_bytes,
        2 * length * (length + 1) * shape.num_heads * shape.head_dim,
        _paged_calls(backend, inputs),
        lambda: _matches_torch(backend, inputs, shape.dtype),
        {
            "torch sdpa": lambda: _sdpa_calls(inputs, causal=True),
            "cuDNN sdpa": lambda: _cudnn_calls(inputs, causal=True),
            "varlen_attn": lambda: _varlen_calls(inputs, causal=True),
            "flashinfer": lambda: _flashinfer_prefill(inputs),
            "fa3": lambda: _fa3_prefill(inputs),
        },
    )


def small_chunk_case(backend: Any, shape: GPUShape, device: torch.device) -> KernelCase:
    """A few rows behind a long prefix, whose keys are split; beside the same with keys that are not."""
    rows, start = shape.small_chunk
    num_bytes = (rows + start) * shape.token_bytes + 2 * rows * shape.num_heads * shape.head_dim * shape.dtype.itemsize
    inputs = PagedInputs(shape, [(rows, start)], copies(num_bytes, shape.rotate_bytes), device)
    return KernelCase(
        "small chunk attention",
        f"{rows:,} behind {start:,}",
        num_bytes,
        2 * rows * (2 * start + rows + 1) * shape.num_heads * shape.head_dim,
        _paged_calls(backend, inputs),
        lambda: (
            _matches_torch(backend, inputs, shape.dtype)
            or _matches_torch(backend, inputs, shape.dtype, batch_invariant=True)
        ),
        {
            "not split": lambda: _paged_calls(backend, inputs, batch_invariant=True),
            "torch sdpa": lambda: _sdpa_calls(inputs, causal=True),
        },
    )


def awkward_problem(backend: Any, shape: GPUShape, device: torch.device, *, short: bool) -> str:
    """Check sequences of odd lengths in one batch against the token-by-token reference in float64; "" or the error."""
    sizes, windows = (SHORT_AWKWARD, SHORT_WINDOWS) if short else (AWKWARD, AWKWARD_WINDOWS)
    inputs = PagedInputs(shape, sizes, 1, device)
    plan = backend.plan_attention(inputs.spans, inputs.layout, inputs.num_heads, device)
    for window, softcap in zip(windows, SOFTCAPS, strict=True):
        found = backend.paged_attention(inputs.q[0], inputs.kv, 0, plan, AttentionRule(inputs.scale, window, softcap))
        expected = reference.paged_attention(
            inputs.q[0].double(), inputs.kv, 0, inputs.spans, scale=inputs.scale, window=window, softcap=softcap
        )
        problem = difference(found, expected, shape.dtype)
        if problem:
            return f"window {window}, softcap {softcap}: {problem}"
    return ""


def _paged_calls(backend: Any, inputs: PagedInputs, *, batch_invariant: bool = False) -> list[Call]:
    plan = backend.plan_attention(inputs.spans, inputs.layout, inputs.num_heads, inputs.device)
    rule = AttentionRule(inputs.scale, batch_invariant=batch_invariant)
    return [
        lambda layer=layer: backend.paged_attention(inputs.q[layer], inputs.kv, layer, plan, rule)  # type: ignore[misc]
        for layer in range(inputs.layout.num_layers)
    ]


def _matches_torch(backend: Any, inputs: PagedInputs, dtype: torch.dtype, *, batch_invariant: bool = False) -> str:
    """Check the last layer against plain torch in float32; "" or the error."""
    layer, heads, device = inputs.layout.num_layers - 1, inputs.num_heads, inputs.device
    plan = backend.plan_attention(inputs.spans, inputs.layout, heads, device)
    rule = AttentionRule(inputs.scale, batch_invariant=batch_invariant)
    found = backend.paged_attention(inputs.q[layer], inputs.kv, layer, plan, rule)
    layout = KVLayout(inputs.layout.num_blocks, 1, *inputs.layout[2:])
    plain = torch_backend.plan_attention(inputs.spans, layout, heads, device)
    kv = inputs.kv[:, layer : layer + 1].float().contiguous()
    return difference(
        found, torch_backend.paged_attention(inputs.q[layer].float(), kv, 0, plain, AttentionRule(inputs.scale)), dtype
    )


def _sdpa_calls(inputs: PagedInputs, *, causal: bool) -> list[Call]:
    """Over contiguous keys and values, because torch has no blocks."""
    count = inputs.layout.num_layers

    def call(layer: int) -> Call:
        keys, values = inputs.contiguous(layer)
        spans = len(inputs.spans)
        query = inputs.q[layer].view(spans, -1, *inputs.q.shape[2:]).transpose(1, 2).contiguous()
        if not causal or inputs.spans[0].start == 0:
            return lambda: functional.scaled_dot_product_attention(
                query, keys, values, is_causal=causal, enable_gqa=True
            )
        last = torch.arange(query.shape[2], device=inputs.device) + inputs.spans[0].start
        mask = torch.arange(keys.shape[2], device=inputs.device) <= last[:, None]  # its own causal mask begins at key 0
        return lambda: functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    return [call(layer) for layer in range(count)]


def _cudnn_calls(inputs: PagedInputs, *, causal: bool) -> list[Call]:
    """torch's attention by cuDNN only. Raises if cuDNN does not support these sizes."""

    def pinned(call: Call) -> Call:
        def run() -> object:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return call()

        return run

    return [pinned(call) for call in _sdpa_calls(inputs, causal=causal)]


def _varlen_calls(inputs: PagedInputs, *, causal: bool) -> list[Call]:
    """torch's own FlashAttention over packed sequences, keys and values [tokens, kv heads, D]."""
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    known = signature(varlen_attn).parameters  # they differ between versions since torch 2.10
    spans, device = inputs.spans, inputs.device
    heads_of_kv = inputs.num_heads // inputs.layout.num_kv_heads
    ends = torch.tensor([0, *(span.length for span in spans)], dtype=torch.int32, device=device).cumsum(0).int()
    rows = torch.tensor([0, *(span.num_rows for span in spans)], dtype=torch.int32, device=device).cumsum(0).int()
    most = max(span.num_rows for span in spans), max(span.length for span in spans)
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    if causal:
        options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def call(layer: int) -> Call:
        keys, values = (part.transpose(1, 2).flatten(0, 1).contiguous() for part in inputs.contiguous(layer))
        if "enable_gqa" not in known:
            keys, values = (part.repeat_interleave(heads_of_kv, 1) for part in (keys, values))
        return lambda: varlen_attn(inputs.q[layer], keys, values, rows, ends, *most, **options)

    return [call(layer) for layer in range(inputs.layout.num_layers)]


def _flashinfer_decode(inputs: PagedInputs, shape: GPUShape) -> list[Call]:
    """FlashInfer's paged decode on its own layout, [pages, K|V, kv heads, page, D]."""
    flashinfer = import_module("flashinfer")
    device, pages = inputs.device, [span.block_table[:-1] for span in inputs.spans]
    counts = torch.tensor([0, *(len(table) for table in pages)])
    lasts = [(span.length - 1) % shape.block_size + 1 for span in inputs.spans]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 * 2**20, dtype=torch.uint8, device=device), "HND", use_tensor_cores=True
    )
    wrapper.plan(
        counts.cumsum(0).int().to(device),
        torch.tensor([block for table in pages for block in table], dtype=torch.int32, device=device),
        torch.tensor(lasts, dtype=torch.int32, device=device),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        data_type=shape.dtype,
    )
    caches = [inputs.kv[:, layer].permute(0, 3, 1, 2, 4).contiguous() for layer in range(inputs.layout.num_layers)]
    return [lambda q=q, kv=kv: wrapper.run(q, kv) for q, kv in zip(inputs.q, caches, strict=True)]  # type: ignore[misc]


def _flashinfer_prefill(inputs: PagedInputs) -> list[Call]:
    """FlashInfer's causal prefill over contiguous keys and values, [L, kv heads, D]."""
    flashinfer = import_module("flashinfer")
    both = [inputs.contiguous(layer) for layer in range(inputs.layout.num_layers)]
    flat = [(keys[0].transpose(0, 1).contiguous(), values[0].transpose(0, 1).contiguous()) for keys, values in both]
    return [
        lambda q=q, k=k, v=v: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)  # type: ignore[misc]
        for q, (k, v) in zip(inputs.q, islice(cycle(flat), len(inputs.q)), strict=True)
    ]


def _fa3_decode(inputs: PagedInputs) -> list[Call]:
    """FlashAttention-3's paged decode on its own layout, keys and values apart: [pages, page, kv heads, D]."""
    fa3, device = import_module("flash_attn_interface"), inputs.device
    table = torch.tensor([span.block_table[:-1] for span in inputs.spans], dtype=torch.int32, device=device)
    lengths = torch.tensor([span.length for span in inputs.spans], dtype=torch.int32, device=device)
    caches = [inputs.kv[:, layer].permute(3, 0, 2, 1, 4).contiguous() for layer in range(inputs.layout.num_layers)]
    return [
        lambda q=q[:, None], k=k, v=v: fa3.flash_attn_with_kvcache(  # type: ignore[misc]
            q, k, v, cache_seqlens=lengths, page_table=table, causal=True
        )
        for q, (k, v) in zip(inputs.q, caches, strict=True)
    ]


def _fa3_prefill(inputs: PagedInputs) -> list[Call]:
    """FlashAttention-3's causal prefill over contiguous keys and values, [1, L, kv heads, D]."""
    fa3 = import_module("flash_attn_interface")
    both = [inputs.contiguous(layer) for layer in range(inputs.layout.num_layers)]
    flat = [(keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()) for keys, values in both]
    return [
        lambda q=q[None], k=k, v=v: fa3.flash_attn_func(q, k, v, causal=True)  # type: ignore[misc]
        for q, (k, v) in zip(inputs.q, islice(cycle(flat), len(inputs.q)), strict=True)
    ]
