"""Compare operations other than attention with plain torch: rotary embedding, norms, gates, sampling and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.agreement.attention import name
from kernels.agreement.gate import Check, Finding, finding
from kernels.agreement.poisoned_cache import PoisonedCache
from kernels.agreement.seats import seats_check
from kernels.agreement.shape import CheckedShape
from kernels.backends import backend
from kernels.blocks import block_sums, gather_blocks, scatter_blocks, wire_bytes
from kernels.interface import LARGEST_FP8, Draw, HeadNorms, LatentNorm, SamplingTensors
from kernels.plain import backend as plain
from kernels.plain import blocks as plain_blocks
from kernels.plain import sample_by_sorting
from kernels.sampling import sample

ROWS = 19
"""Odd, so not a multiple of the rows per program."""
MAX_DIFFERENT_DRAWS = 1
"""Maximum number of random draws that may differ: rounding may move a token boundary across the noise value."""


def elementwise_checks(shape: CheckedShape, cache: PoisonedCache) -> Iterator[Check]:
    yield partial(latents if shape.latent_dim else rotary, shape, cache)
    yield partial(norms, shape, cache)
    for width in dict.fromkeys(shape.widths):
        yield partial(gate, shape, cache, width)
    if shape.vocab_size:
        yield partial(sampling, shape, cache)
    if shape.device_kernels:
        layout, device = cache.layout, cache.kv.device
        kernels = backend(device.type)
        yield partial(seats_check, kernels.fill_rows, layout.block_size, shape.longest, device, cache.random)
        for quantised in (False, True) if shape.quantised_wire else (False,):
            yield partial(copies, cache, quantised)
        yield partial(sums, cache)


def rotary(shape: CheckedShape, cache: PoisonedCache) -> Finding:
    """Compare cache writes and rotated queries."""
    layout, device = cache.layout, cache.kv.device
    dim, kv_heads = layout.head_dim, layout.num_kv_heads
    heads = (shape.num_heads, kv_heads) if shape.wide_qk_norm else (1, 1)
    weights = [_weight(dim * count, cache) for count in heads]
    is_normed = shape.qk_norm or shape.wide_qk_norm
    head_norms = HeadNorms(weights[0], weights[1], shape.eps) if is_normed else None
    kernel = backend(device.type).rotate_and_write

    def run(write: Callable[..., Tensor], inputs: list[Tensor], angles: Tensor, *places: Any) -> Tensor:
        return write(*inputs, angles.cos(), angles.sin(), *places, head_norms, shape.scales)

    words = f"{shape.num_heads} + 2 x {kv_heads} heads of {dim}, KV in {name(cache.kv.dtype)}, {name(shape.dtype)}"
    kernels = partial(run, kernel), partial(run, plain.rotate_and_write)
    widths = [(shape.num_heads + 2 * kv_heads) * dim]
    return _written("rotary embedding and KV write", words, shape, cache, widths, dim, kernels)


def latents(shape: CheckedShape, cache: PoisonedCache) -> Finding:
    """Compare latent cache writes and the matching queries."""
    rank, dim, device = shape.latent_dim, cache.layout.head_dim, cache.kv.device
    norm = LatentNorm(_weight(rank, cache), shape.eps)
    kernel = backend(device.type).write_latents

    def run(write: Callable[..., Tensor], inputs: list[Tensor], angles: Tensor, *places: Any) -> Tensor:
        return write(*inputs, angles.cos(), angles.sin(), *places, norm, shape.scales.key)

    words = f"{shape.num_heads} heads of {shape.query_dim}, latents of {rank} + {dim - rank}"
    words += f" in {name(cache.kv.dtype)}, {name(shape.dtype)}"
    widths = [shape.num_heads * shape.query_dim, shape.num_heads * rank, dim]
    kernels = partial(run, kernel), partial(run, plain.write_latents)
    return _written("latents and their write", words, shape, cache, widths, dim - rank, kernels)


def _written(
    kernel: str,
    words: str,
    shape: CheckedShape,
    cache: PoisonedCache,
    widths: list[int],
    rotated: int,
    kernels: tuple[Callable[..., Tensor], Callable[..., Tensor]],
) -> Finding:
    """Compare writes to random slots of all blocks. The last row is padding; all other slots must stay NaN.

    `kernels` (tested, reference) take rows of `widths`, angles of `rotated` elements, cache, layer and slots.
    """
    layout, device = cache.layout, cache.kv.device
    layer, size = layout.num_layers - 1, layout.block_size
    cache.give_back()
    cache.poison()
    own = torch.tensor(cache.blocks[1:])
    slots = (own[:, None] * size + torch.arange(size)).flatten()
    slots = slots[torch.randperm(len(slots), generator=cache.random)][:ROWS]
    rows = len(slots)
    inputs = [_random(shape, cache, rows, width) for width in widths]
    angles = (torch.rand(rows, rotated // 2, generator=cache.random) * 6).to(device)
    written = rows - 1 if shape.device_kernels and rows > 1 else rows
    given = slots.clone()
    given[written:] = -1
    q = kernels[0](inputs, angles, cache.kv, layer, given.to(device))[:written]
    found = cache.read(layer, cache.blocks)
    expected = torch.full_like(found, float("nan"))
    place = {block: index for index, block in enumerate(cache.blocks)}
    moved = torch.tensor([place[int(slot) // size] * size + int(slot) % size for slot in slots[:written]])
    plain_q = kernels[1]([one[:written].float() for one in inputs], angles[:written], expected, 0, moved.to(device))
    if not torch.equal(found.isnan(), expected.isnan()):
        problem = "wrote to slots that were not requested, or did not write all requested slots"
        return Finding(kernel, words, float("inf"), 0.0, problem)
    if cache.kv.dtype == torch.float8_e4m3fn:  # with small scales, values may exceed its range
        expected = expected.clamp(-LARGEST_FP8, LARGEST_FP8)
    pairs = [("queries", q, plain_q, shape.dtype)]
    pairs += [("keys and values", found.nan_to_num(), expected.nan_to_num(), cache.kv.dtype)]
    return finding(kernel, words, pairs)


def norms(shape: CheckedShape, cache: PoisonedCache) -> Finding:
    """Compare the norm, and the fused add and norm, which rounds the sum before normalising."""
    x, delta = (_random(shape, cache, ROWS, shape.hidden_size) for _ in range(2))
    weight = (torch.rand(shape.hidden_size, generator=cache.random) + 0.5).to(x.device)
    total, normed = dispatch.add_rms_norm(x, delta, weight, shape.eps)
    alone = dispatch.rms_norm(x, weight, shape.eps)
    pairs = [
        ("norm", alone, plain.rms_norm(x.float(), weight, shape.eps), shape.dtype),
        ("sum", total, x.double() + delta.double(), shape.dtype),
        ("norm of the sum", normed, plain.rms_norm(total.float(), weight, shape.eps), shape.dtype),
    ]
    return finding("norm", f"{ROWS} x {shape.hidden_size}, {name(shape.dtype)}", pairs)


def gate(shape: CheckedShape, cache: PoisonedCache, width: int) -> Finding:
    x = _random(shape, cache, ROWS, 2 * width) * 3
    found, expected = dispatch.gated(x, shape.activation), plain.gated(x.float(), shape.activation)
    words = f"{shape.activation}, {ROWS} x {width}, {name(shape.dtype)}"
    return finding("gate", words, [("output", found, expected, shape.dtype)])


def sampling(shape: CheckedShape, cache: PoisonedCache) -> Finding:
    """Compare greedy and random draws with sampling by sorting. A row that contains NaN must not yield a token."""
    device, vocab = cache.kv.device, shape.vocab_size
    kinds = [Draw(), Draw(0.8), Draw(1.0, 20), Draw(1.0, 0, 0.7), Draw(0.7, 50, 0.9, 0.02)]
    draws = [kinds[i % len(kinds)]._replace(seed=i, position=100 + i) for i in range(2 * len(kinds))]
    logits = (torch.randn(len(draws), vocab, generator=cache.random) * 3).to(device)
    found = _drawn(logits, draws)
    expected = sample_by_sorting(logits, SamplingTensors.pack(draws, device)).tolist()
    differ = [draw for draw, one, other in zip(draws, found, expected, strict=True) if one != other]
    spoilt = logits[:4].clone()
    spoilt[::2, vocab // 2] = float("nan")
    tokens = [token for batch in (draws[1:5], [Draw()] * 4) for token in _drawn(spoilt, batch)[::2]]
    words = f"{len(draws)} x {vocab}"
    problem = ""
    if len(differ) > MAX_DIFFERENT_DRAWS or any(not draw.temperature for draw in differ):
        problem = f"{len(differ)} of {len(draws)} rows draw a different token ({MAX_DIFFERENT_DRAWS} random draw may)"
    elif min(tokens) < vocab:
        problem = f"{sum(token < vocab for token in tokens)} of {len(tokens)} rows with NaN yield a token"
    return Finding("sampling", words, float(len(differ)), float(MAX_DIFFERENT_DRAWS), problem)


def _drawn(logits: Tensor, draws: list[Draw]) -> list[int]:
    tokens: list[int] = sample(logits, SamplingTensors.pack(draws, logits.device)).tolist()
    return tokens


def copies(cache: PoisonedCache, quantised: bool) -> Finding:
    """Compare, byte for byte, copying blocks to a transfer buffer and back. Other blocks must not change."""
    kv, device = cache.kv, cache.kv.device
    cache.give_back()
    cache.poison()
    chosen = cache.take(2 * cache.layout.block_size)
    for layer in range(cache.layout.num_layers):
        numbers = cache.numbers(len(chosen), 1)[:, 0].transpose(1, 2).flatten(0, 1)  # [slots, kv_heads, 2, D]
        cache.write(layer, chosen, 0, numbers)
    ids = torch.tensor(chosen, device=device)
    small = torch.stack([kv[block] for block in chosen])
    buffer = torch.zeros(len(chosen), wire_bytes(kv, quantised=quantised), dtype=torch.uint8, device=device)
    expected = torch.zeros_like(buffer)
    plain_blocks.gather_blocks(small, torch.arange(len(chosen), device=device), expected, quantised)
    gather_blocks(kv, ids, quantised=quantised, out=buffer)
    words = f"{len(chosen)} blocks of {kv[0].numel() * kv.element_size()} bytes" + (", in 8 bits" if quantised else "")
    if not torch.equal(buffer, expected):
        off = int((buffer != expected).sum())
        return Finding("gather blocks", words, float(off), 0.0, f"{off} of {buffer.numel()} bytes differ")
    cache.poison()
    back = torch.zeros_like(small)
    plain_blocks.scatter_blocks(expected, back, torch.arange(len(chosen), device=device), quantised)
    scatter_blocks(buffer, kv, ids, quantised=quantised)
    there = torch.stack([kv[block] for block in chosen]).view(torch.uint8)
    off = int((there != back.view(torch.uint8)).sum())
    others = any(not cache.read(0, [block]).isnan().all() for block in cache.blocks if block not in chosen)
    problem = f"{off} of {there.numel()} bytes differ" if off else "wrote to an unrelated block" if others else ""
    return Finding("gather and scatter blocks", words, float(off), 0.0, problem)


def _weight(width: int, cache: PoisonedCache) -> Tensor:
    return (torch.rand(width, generator=cache.random) + 0.5).to(cache.kv.device)


def _random(shape: CheckedShape, cache: PoisonedCache, rows: int, width: int) -> Tensor:
    made = torch.randn(rows, width, generator=cache.random)
    return made.to(device=cache.kv.device, dtype=shape.dtype)


def sums(cache: PoisonedCache) -> Finding:
    """Compare the sums of blocks with arbitrary contents, including NaN."""
    kv, device = cache.kv, cache.kv.device
    ids = torch.arange(kv.shape[0], device=device).flip(0)
    expected = torch.empty_like(ids)
    plain_blocks.block_sums(kv, ids, expected)
    off = int((block_sums(kv, ids) != expected).sum())
    words = f"{len(ids)} blocks of {kv[0].numel() * kv.element_size()} bytes"
    return Finding("sums of blocks", words, float(off), 0.0, f"{off} of {len(ids)} differ" if off else "")
