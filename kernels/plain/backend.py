"""Attention over blocks in plain torch: gather the blocks of a group of sequences once, then one fused attention call.

Works on every device. Blocks of one layer and head are rows of a flat view of the cache, so one `index_select` yields
[sequences, kv heads, tokens, K|V, head_dim] without a transposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import (
    UNSCALED,
    AttentionPlan,
    AttentionRule,
    HeadNorms,
    KVLayout,
    KVScales,
    LatentNorm,
    QuerySpan,
    head_dim_of,
    numbers_of,
    quantised,
    saturated,
    scales_of,
    unpacked,
)
from kernels.plain.blocks import block_sums as block_sums
from kernels.plain.blocks import gather_blocks as gather_blocks
from kernels.plain.blocks import scatter_blocks as scatter_blocks
from kernels.plain.experts import add_gated as add_gated
from kernels.plain.experts import combine as combine
from kernels.plain.experts import route as route
from kernels.plain.host_plan import HostPlan
from kernels.plain.sampling import sample as sample
from kernels.plain.seats import fill_rows as fill_rows

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss' gate
packing: None = None
products: None = None
MAX_PADDING = 1.25  # maximum ratio of the longest to the shortest row of a group


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length with one query row each.

    rows [B] int64; gather [B * num_kv_heads * blocks] rows of the flat cache; mask bool [B, 1, 1, L] or None when no
    row is padded; padding: (sequence, token) indices of the gathered slots that hold no key of it.
    """

    rows: Tensor
    gather: Tensor
    num_kv_heads: int
    mask: Tensor | None
    padding: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Several query rows of one sequence against keys [skip, skip + length) of its gathered blocks.

    mask is bool [count, length], or None when query i sees the keys up to i and length == count.
    """

    row: int
    count: int
    gather: Tensor
    num_kv_heads: int
    skip: int
    length: int
    mask: Tensor | None


class TorchPlan(AttentionPlan):
    """Index tensors of a step, built at the first use of each window."""

    def __init__(self, spans: Sequence[QuerySpan], layout: KVLayout, device: torch.device) -> None:
        self.spans, self.layout, self.device = spans, layout, device
        self._windows: dict[int, tuple[list[DecodeGroup], list[PrefillSpan]]] = {}

    def window(self, window: int) -> tuple[list[DecodeGroup], list[PrefillSpan]]:
        if window not in self._windows:
            decodes = [_decode_group(group, self.layout, window, self.device) for group in _groups(self, window)]
            wide = [span for span in self.spans if span.num_rows > 1]
            self._windows[window] = (decodes, [_prefill_span(span, self.layout, window, self.device) for span in wide])
        return self._windows[window]


def plan_attention(spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int, device: torch.device) -> TorchPlan:
    return TorchPlan(spans, layout, device)


def step_plan(num_rows: int, max_blocks: int, layout: KVLayout, num_heads: int, device: torch.device) -> HostPlan:
    return HostPlan(plan_attention, num_rows, max_blocks, layout, num_heads, device)


def _groups(plan: TorchPlan, window: int) -> list[list[QuerySpan]]:
    """Group single-row spans by length, so that one long row does not pad all rows."""
    single = sorted((span for span in plan.spans if span.num_rows == 1), key=lambda span: _num_visible(span, window))
    groups: list[list[QuerySpan]] = []
    for span in single:
        limit = max(MAX_PADDING * _num_visible(groups[-1][0], window), plan.layout.block_size) if groups else 0.0
        if groups and _num_visible(span, window) <= limit:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _num_visible(span: QuerySpan, window: int) -> int:
    """Return the number of keys that the span's last query sees."""
    return min(span.length, window) if window else span.length


def _gather_rows(blocks: np.ndarray, layout: KVLayout, device: torch.device) -> Tensor:
    """Return the flat-cache rows of blocks [..., n], head by head: int64 [... * num_kv_heads * n]."""
    heads = np.arange(layout.num_kv_heads, dtype=np.int64)
    rows = blocks[..., None, :] * (layout.num_layers * layout.num_kv_heads) + heads[:, None]
    return torch.from_numpy(rows.reshape(-1)).to(device)


def _decode_group(spans: Sequence[QuerySpan], layout: KVLayout, window: int, device: torch.device) -> DecodeGroup:
    size = layout.block_size
    starts = np.array([span.length - _num_visible(span, window) for span in spans])  # first visible key
    ends = np.array([span.length for span in spans])
    first = starts // size
    counts = -(-ends // size) - first
    width = int(counts.max())
    blocks = np.empty((len(spans), width), dtype=np.int64)
    for i, span in enumerate(spans):
        table = span.block_table[first[i] : first[i] + counts[i]]
        blocks[i, : counts[i]] = table
        blocks[i, counts[i] :] = table[0]  # padding repeats a block of the same sequence
    at = np.arange(width * size)[None, :] + (first * size)[:, None]  # [B, L] positions of the gathered slots
    seen = (at >= starts[:, None]) & (at < ends[:, None])
    rows = torch.tensor([span.row for span in spans], device=device)
    gather = _gather_rows(blocks, layout, device)
    if seen.all():
        return DecodeGroup(rows, gather, layout.num_kv_heads, None, None)
    sequence, token = np.nonzero(~seen)
    return DecodeGroup(
        rows,
        gather,
        layout.num_kv_heads,
        torch.from_numpy(seen).to(device)[:, None, None, :],
        (torch.from_numpy(sequence).to(device), torch.from_numpy(token).to(device)),
    )


def _prefill_span(span: QuerySpan, layout: KVLayout, window: int, device: torch.device) -> PrefillSpan:
    size = layout.block_size
    start = max(0, span.start - window + 1) if window else 0  # first key that the first query sees
    first = start // size
    table = np.array(span.block_table[first : -(-span.length // size)], dtype=np.int64)
    length = span.length - start
    mask = None
    if start or length != span.num_rows or (window and span.length > window):
        query = np.arange(span.start, span.length)[:, None]
        key = np.arange(start, span.length)[None, :]
        seen = key <= query
        if window:
            seen &= key > query - window
        mask = torch.from_numpy(seen).to(device)
    gather = _gather_rows(table, layout, device)
    return PrefillSpan(span.row, span.num_rows, gather, layout.num_kv_heads, start - first * size, length, mask)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    plan: AttentionPlan,
    rule: AttentionRule,
) -> Tensor:
    if not isinstance(plan, TorchPlan):
        raise TypeError(f"a {type(plan).__name__} was made by another backend")
    num_blocks, num_layers, heads, size, parts, width = kv.shape
    out = torch.empty((*q.shape[:2], rule.latent_dim or q.shape[2]), dtype=q.dtype, device=q.device)
    flat = kv.view(num_blocks * num_layers * heads, size, parts, width)[layer * heads :]
    decodes, prefills = plan.window(rule.window)
    rule = rule._replace(scale=rule.scale * rule.k_scale)
    for group in decodes:
        _decode(q, flat, group, rule, out)
    for span in prefills:
        _prefill(q, flat, span, rule, out)
    return out


def _gather(flat: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of the flat cache in a type for computation: [rows, size, 2 (latents: 1), head_dim]."""
    if flat.dtype.itemsize > 1:
        return flat.index_select(0, rows)
    return unpacked(flat.view(torch.uint8).index_select(0, rows).view(flat.dtype)).to(dtype)


def _decode(q: Tensor, flat: Tensor, group: DecodeGroup, rule: AttentionRule, out: Tensor) -> None:
    batch, heads, dim = group.rows.shape[0], group.num_kv_heads, q.shape[2]
    both = _gather(flat, group.gather, q.dtype).view(batch, heads, -1, flat.shape[2], dim)  # [B, Hkv, L, 2, D]
    if group.padding is not None:
        both.transpose(1, 2)[group.padding] = 0.0  # unused slots may hold NaN, and 0 * NaN is NaN
    query = q.index_select(0, group.rows).view(batch, heads, -1, dim)  # [B, Hkv, G, D]
    sinks = None if rule.sinks is None else rule.sinks.view(heads, -1, 1)
    result = _attend(query, *_keys_and_values(both, rule), group.mask, False, rule, sinks)
    out.index_copy_(0, group.rows, result.reshape(batch, -1, out.shape[2]))


def _prefill(q: Tensor, flat: Tensor, span: PrefillSpan, rule: AttentionRule, out: Tensor) -> None:
    heads, dim, parts = span.num_kv_heads, q.shape[2], flat.shape[2]
    group = q.shape[1] // heads
    both = _gather(flat, span.gather, q.dtype).view(heads, 1, -1, parts, dim)
    both = both[:, :, span.skip : span.skip + span.length]
    both = both.expand(heads, group, span.length, parts, dim)  # a view: the queries of a group share their keys
    rows = slice(span.row, span.row + span.count)
    query = q[rows].view(span.count, heads, group, dim).permute(1, 2, 0, 3)  # [Hkv, G, count, D]
    sinks = None if rule.sinks is None else rule.sinks.view(heads, group, 1, 1)
    result = _attend(query, *_keys_and_values(both, rule), span.mask, span.mask is None, rule, sinks)
    out[rows] = result.permute(2, 0, 1, 3).reshape(span.count, heads * group, out.shape[2])


def _keys_and_values(both: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Split [..., 2, head_dim], or latents [..., 1, head_dim], into keys and values."""
    keys = both[..., 0, :]
    return keys, keys[..., : rule.latent_dim] if rule.latent_dim else both[..., 1, :]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    rule: AttentionRule,
    sinks: Tensor | None,
) -> Tensor:
    """Broadcast sinks to an additional column of the scores."""
    if not rule.softcap and sinks is None:
        result = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=rule.scale
        )
        return result if rule.v_scale == 1.0 else result * rule.v_scale
    scores = (query @ key.transpose(-1, -2)).float() * (rule.scale / (rule.softcap or 1.0))
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores)
    if causal:
        count = query.shape[-2]
        mask = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[-2]]
    result = weights.to(value.dtype) @ value
    return result if rule.v_scale == 1.0 else result * rule.v_scale


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    norms: HeadNorms | None,
    scales: KVScales = UNSCALED,
) -> Tensor:
    kv_heads, size = kv.shape[2], kv.shape[3]
    heads = qkv.shape[1] // head_dim_of(kv) - 2 * kv_heads
    qkv = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
    if norms is not None:
        parts = ((qkv[:, :heads], norms.query), (qkv[:, heads:-kv_heads], norms.key))
        qk = torch.cat([_heads_normed(part, weight, norms.eps) for part, weight in parts], dim=1)
    else:
        qk = qkv[:, :-kv_heads]
    qk = _rotated(qk, cos, sin)
    new = torch.stack((qk[:, heads:], qkv[:, -kv_heads:].float()), dim=2)  # [T, Hkv, 2, D]
    if scales != UNSCALED:
        new = new / torch.tensor(scales, device=new.device)[:, None]
    _write(new, kv[:, layer], slots // size, slots % size)
    return qk[:, :heads].to(qkv.dtype)


def _heads_normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise [T, heads, D] per head, or over all heads: see `HeadNorms`."""
    if len(weight) == heads.shape[2]:
        return rms_norm(heads, weight, eps)
    return rms_norm(heads.flatten(1), weight, eps).view(heads.shape)


def write_latents(
    q: Tensor,
    absorbed: Tensor,
    latents: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    norm: LatentNorm,
    scale: float = 1.0,
) -> Tensor:
    tokens, rope, size = len(latents), 2 * cos.shape[1], kv.shape[3]
    rank = latents.shape[1] - rope
    heads = absorbed.shape[1] // rank
    absorbed = absorbed.view(tokens, heads, rank)
    rotated = _rotated(q.view(tokens, heads, q.shape[1] // heads)[..., -rope:], cos, sin).to(q.dtype)
    wide = latents[:, :rank].float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    new = torch.cat((normed, _rotated(latents[:, None, rank:], cos, sin)[:, 0]), dim=-1)
    if scale != 1.0:
        new = new / torch.tensor(scale, device=new.device)
    _write(new[:, None, None], kv[:, layer], slots // size, slots % size)
    return torch.cat((absorbed, rotated), dim=-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate element i of x [T, heads, D] with element i + D / 2, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _write(new: Tensor, kv: Tensor, blocks: Tensor, slots: Tensor) -> None:
    """Write float32 [T, heads, 2 (latents: 1), head_dim] to a layer of the cache."""
    if kv.dtype == torch.int8:
        numbers, scales = quantised(new)
        numbers_of(kv).transpose(1, 2)[blocks, slots] = numbers
        scales_of(kv).permute(0, 3, 1, 2)[blocks, slots] = scales
    elif kv.dtype == torch.float8_e4m3fn:  # torch cannot scatter this type
        kv.view(torch.uint8).transpose(1, 2)[blocks, slots] = saturated(new).view(torch.uint8)
    else:
        kv.transpose(1, 2)[blocks, slots] = new.to(kv.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm(total, weight, eps)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
    return functional.gelu(gate, approximate="tanh") * up
