"""Decode and prefill attention beside plain torch, over blocks in which every key that must not be read is NaN.

The values at both ends of what a row sees weigh more than the others, so that a mask that is off by one shows.
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
"""Of random queries: scores of some spread, so that a wrong scale changes the weights."""
SPLIT = 515
"""Tokens of a sequence that decode attention cuts into two."""
SPLIT_CHUNK = 2109
"""Tokens of a sequence at whose end a chunk of a few rows has its keys split."""
FEW_ROWS = 9
"""So few that each model's heads make few programs of them."""


class Size(NamedTuple):
    """`rows` tokens of a step behind `start` others."""

    rows: int
    start: int


def decode_sizes(block_size: int, window: int, most: int) -> list[Size]:
    """One new token each: a lone one, whole and begun blocks, two splits, beyond a window."""
    lengths = {1, block_size, block_size + 1, 131, SPLIT, window + 2 if window else SPLIT}
    return [Size(1, length - 1) for length in sorted({min(length, most) for length in lengths})]


def prefill_sizes(block_size: int, window: int, most: int) -> list[Size]:
    """A prompt that ends inside of a block; a chunk behind a prefix, in which a window begins to leave keys out, and
    one whose keys are split. Through a window of as many keys that chunk's are."""
    rows = max(2, min(block_size + 13, most))
    start = max(0, min(max(SPLIT - rows // 2, window - 10), most - 2 * rows - block_size))
    split = [Size(FEW_ROWS, SPLIT_CHUNK - FEW_ROWS)] if most >= SPLIT_CHUNK and not window else []
    return [Size(rows, 0), Size(min(37, rows), start), *split]


def attention_checks(shape: CheckedShape, cache: PoisonedCache) -> Iterator[Check]:
    """Both kinds for each rule of the model."""
    size, most = cache.layout.block_size, min(shape.longest, cache.num_tokens)
    for kind in shape.rules:
        yield partial(attention, "decode attention", shape, kind, cache, decode_sizes(size, kind.rule.window, most))
        yield partial(attention, "prefill attention", shape, kind, cache, prefill_sizes(size, kind.rule.window, most))


def attention(kernel: str, shape: CheckedShape, kind: LayerRule, cache: PoisonedCache, sizes: list[Size]) -> Finding:
    """The rows of `sizes` in one step, as far as there are blocks, through one plan."""
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
    """Spans with blocks of their own, written as far as their rows may see. Sizes without blocks are left out."""
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
    """Keys and values float32 [count, kv_heads, parts, head_dim]; the first and the last `rows` values are larger.

    Latents, which are both, are larger there.
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
