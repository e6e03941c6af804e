"""References for tests: slow and simple, in the dtype of their inputs, float64 for oracles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.interface import QuerySpan, unpacked


def gather_sequence(kv: Tensor, layer: int, block_table: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [length, num_kv_heads, head_dim] of a sequence. Latents are both keys and values."""
    block_size = kv.shape[3]
    slots = [kv[block_table[i // block_size], layer, :, i % block_size] for i in range(length)]
    both = torch.stack(slots)  # [length, num_kv_heads, 2, head_dim]
    return both[:, :, 0], both[:, :, -1]


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    spans: Sequence[QuerySpan],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    latent_dim: int = 0,
) -> Tensor:
    """Same contract as `kernels.paged_attention`, from spans instead of a plan; float64 in, float64 out."""
    kv = unpacked(kv)
    width = latent_dim or q.shape[2]
    out = torch.full((*q.shape[:2], width), float("nan"), dtype=q.dtype)
    group = q.shape[1] // kv.shape[2]
    for span in spans:
        keys, values = gather_sequence(kv, layer, span.block_table, span.length)
        keys, values = (t.repeat_interleave(group, dim=1).to(q.dtype) for t in (keys, values))  # [L, num_heads, D]
        for i in range(span.num_rows):
            position = span.start + i
            first = max(0, position - window + 1) if window else 0
            seen_k, seen_v = keys[first : position + 1], values[first : position + 1, :, :width]
            scores = torch.einsum("hd,lhd->hl", q[span.row + i], seen_k) * (scale * k_scale)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.to(q.dtype)[:, None]), dim=1)
            weights = torch.softmax(scores, dim=-1)[:, : len(seen_k)]
            out[span.row + i] = torch.einsum("hl,lhd->hd", weights, seen_v) * v_scale
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same contract as `kernels.rms_norm`."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Same contract as `kernels.add_rms_norm`."""
    return x + delta, rms_norm(x + delta, weight, eps)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Same contract as `kernels.rotate_and_write`."""
    _, _, kv_heads, block_size, _, dim = kv.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
    q, k, v = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
    q = rotate(q if q_norm is None else heads_normed(q, q_norm, eps), cos, sin)
    k = rotate(k if k_norm is None else heads_normed(k, k_norm, eps), cos, sin)
    for i, slot in enumerate(slots.tolist()):
        kv[slot // block_size, layer, :, slot % block_size, 0] = k[i].to(kv.dtype)
        kv[slot // block_size, layer, :, slot % block_size, 1] = v[i].to(kv.dtype)
    return q


def heads_normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise [T, heads, head_dim] per head, or over all heads if the weight has their full width."""
    rows = heads if len(weight) == heads.shape[2] else heads.flatten(1)
    return rms_norm(rows, weight, eps).view(heads.shape)


def write_latents(
    q: Tensor,
    absorbed: Tensor,
    latents: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """Same contract as `kernels.write_latents`."""
    rope, block_size = 2 * cos.shape[1], kv.shape[3]
    rank = latents.shape[1] - rope
    keys = rotate(latents[:, None, rank:], cos, sin)[:, 0]
    new = torch.cat((rms_norm(latents[:, :rank], weight, eps), keys), dim=1)
    for i, slot in enumerate(slots.tolist()):
        kv[slot // block_size, layer, 0, slot % block_size, 0] = new[i].to(kv.dtype)
    absorbed = absorbed.view(len(q), -1, rank)
    queries = q.view(len(q), absorbed.shape[1], -1)
    return torch.cat((absorbed, rotate(queries[..., -rope:], cos, sin)), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] as a complex product of elements i and i + head_dim / 2."""
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float64 else x.float()
    rotated = torch.complex(wide[..., :half].contiguous(), wide[..., half:].contiguous()) * torch.complex(
        cos.to(wide.dtype), sin.to(wide.dtype)
    ).unsqueeze(1)
    return torch.cat((rotated.real, rotated.imag), dim=-1).to(x.dtype)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Same contract as `kernels.gated`."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    if activation == "silu":
        curve = gate / (1 + torch.exp(-gate))
    elif activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        curve = gate / (1 + torch.exp(-1.702 * gate))
    else:
        curve = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    return (curve * up).to(gate_up.dtype)


def bits_allowed(mask: Tensor | None, vocab: int) -> Tensor:
    """Unpack int32 [ceil(vocab / 32)] to bool [vocab]; all True for None."""
    if mask is None:
        return torch.ones(vocab, dtype=torch.bool)
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little", count=vocab)
    return torch.from_numpy(bits).view(torch.bool)
