"""Compare decode and prefill attention with plain torch. Keys that must not be read are NaN.

Values at both ends of a row's visible range are larger than the others, which exposes off-by-one errors in masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import dispatch
from kernels.agreement.gate import Check, Finding, finding
from kernels.agreement.poisoned_cache import FREED, PoisonedCache
from kernels.agreement.shape import CheckedShape, LayerRule
from kernels.backends import backend
from kernels.interface import QuerySpan
from kernels.plain import backend as plain

QUERY_SCALE = 2.0
"""Scale of random queries. Spreads the scores, so that a wrong attention scale changes the weights."""
SPLIT = 515
"""Length of a sequence that decode attention splits in two."""
SPLIT_CHUNK = 2109
"""Length of a sequence for which prefill attention splits the keys of a small last chunk."""
FEW_ROWS = 9
"""Rows of a small chunk: few programs for every model's number of heads."""


class Size(NamedTuple):
    """A chunk of `rows` tokens from position `start`."""

    rows: int
    start: int


def decode_sizes(block_size: int, window: int, most: int) -> list[Size]:
    """Return sizes of one new token each: first token, full and partial blocks, two splits, and past a window."""
    lengths = {1, block_size, block_size + 1, 131, SPLIT, window + 2 if window else SPLIT}
    return [Size(1, length - 1) for length in sorted({min(length, most) for length in lengths})]


def prefill_sizes(block_size: int, window: int, most: int) -> list[Size]:
    """Return the sizes of a prompt that ends within a block, a chunk after a prefix during which the window starts to
    exclude keys, and, without a window, a small chunk with split keys."""
    rows = max(2, min(block_size + 13, most))
    start = max(0, min(max(SPLIT - rows // 2, window - 10), most - 2 * rows - block_size))
    split = [Size(FEW_ROWS, SPLIT_CHUNK - FEW_ROWS)] if most >= SPLIT_CHUNK and not window else []
    return [Size(rows, 0), Size(min(37, rows), start), *split]


def attention_checks(shape: CheckedShape, cache: PoisonedCache) -> Iterator[Check]:
    """Yield decode and prefill checks for each attention rule of the model."""
    size, most = cache.layout.block_size, min(shape.longest, cache.num_tokens)
    for kind in shape.rules:
        yield partial(attention, "decode attention", shape, kind, cache, decode_sizes(size, kind.rule.window, most))
        yield partial(attention, "prefill attention", shape, kind, cache, prefill_sizes(size, kind.rule.window, most))


def attention(kernel: str, shape: CheckedShape, kind: LayerRule, cache: PoisonedCache, sizes: list[Size]) -> Finding:
    """Compare attention for chunks of `sizes` in one step. Chunks for which no blocks are left are dropped."""
    rule, device = kind.rule, cache.kv.device
    cache.give_back()
    cache.poison()
    spans = placed(cache, kind, sizes)
    rows = sum(span.num_rows for span in spans)
    q = torch.randn(rows, shape.num_heads, cache.layout.head_dim, generator=cache.random) * QUERY_SCALE
    q = q.to(device=device, dtype=shape.dtype)
    plan = dispatch.plan_attention(spans, cache.layout, shape.num_heads, device)
    found = backend(device.type).paged_attention(q, cache.kv, kind.layer, plan, rule)
    kv, layout, moved = cache.plain(kind.layer, spans)
    plain_plan = plain.plan_attention(moved, layout, shape.num_heads, device)
    expected = plain.paged_attention(q.float(), kv, 0, plain_plan, rule)
    return finding(kernel, words_of(shape, kind, cache), [("output", found, expected, shape.dtype)])


def placed(cache: PoisonedCache, kind: LayerRule, sizes: list[Size]) -> list[QuerySpan]:
    """Allocate blocks for each chunk and write its visible keys and values. Chunks without free blocks are dropped."""
    spans: list[QuerySpan] = []
    row = 0
    for rows, start in sizes:
        table = cache.take(rows + start)
        if len(table) * cache.layout.block_size < rows + start:
            break
        window = kind.rule.window
        first = max(0, start - window + 1) if window else 0
        made = values(cache, rows, start + rows - first)
        made[:, :, 0] /= kind.rule.k_scale
        if cache.parts > 1:
            made[:, :, 1] /= kind.rule.v_scale
        cache.write(kind.layer, table, first, made)
        spans.append(QuerySpan(row, rows, start, [*table, FREED, FREED]))
        row += rows
    return spans


def values(cache: PoisonedCache, rows: int, count: int) -> Tensor:
    """Return random keys and values, float32 [count, kv_heads, parts, head_dim].

    The first and last `rows` values, or latents, are larger than the others.
    """
    layout = cache.layout
    made = torch.randn(count, layout.num_kv_heads, cache.parts, layout.head_dim, generator=cache.random)
    larger = max(1.0, (count / rows) ** 0.5 / 2)
    ends = torch.ones(count)
    ends[:rows] = ends[max(0, count - rows) :] = larger
    made[:, :, -1] *= ends[:, None, None]
    return made.to(cache.kv.device)


def words_of(shape: CheckedShape, kind: LayerRule, cache: PoisonedCache) -> str:
    layout, rule = cache.layout, kind.rule
    parts = [
        f"layer {kind.layer}, {shape.num_heads} heads on {layout.num_kv_heads} of {layout.head_dim}",
        f"blocks of {layout.block_size} in {name(cache.kv.dtype)}, {name(shape.dtype)}",
    ]
    parts += [f"latents of {rule.latent_dim}"] if rule.latent_dim else []
    parts += [f"window {rule.window}"] if rule.window else []
    parts += [f"softcap {rule.softcap:g}"] if rule.softcap else []
    parts += ["sinks"] if rule.sinks is not None else []
    if (rule.k_scale, rule.v_scale) != (1.0, 1.0):
        parts.append(f"scales {rule.k_scale:.3g} and {rule.v_scale:.3g}")
    return ", ".join(parts)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
