"""Rotary position embedding: tables of cosines and sines for all positions of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.model_files.architecture import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """Return the angles per position, float32 [rotated elements / 2], divided by `factors` (GGUF's rope_freqs)."""
    dim = rope.rotary_dim or head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "off":
        return torch.zeros_like(frequencies)
    if factors is not None:
        return frequencies / factors
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies)
    if rope.scaling == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: slow long waves by `factor`, keep short ones and interpolate between them."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_len / rope.low_freq_factor
    shortest = rope.original_max_len / rope.high_freq_factor
    slowed = frequencies / rope.factor
    smooth = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * slowed + smooth * frequencies
    scaled = torch.where(wavelengths > longest, slowed, between)
    return torch.where(wavelengths < shortest, frequencies, scaled)


def _yarn(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """YaRN (section 3.2): keep waves that turn more than `beta_fast` times and slow those below `beta_slow`."""
    half = len(frequencies)

    def place(turns: float) -> float:
        """Return the index, from the fastest, of the frequency with this many turns in the original context."""
        return half * math.log(rope.original_max_len / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = place(rope.beta_fast), place(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - slowed
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


def rotation_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Return the permutation of a head's elements for the kernels, int64 [head_dim]; None if it is the identity.

    The kernels rotate element i with element i + head_dim / 2, while files may rotate neighbours. Elements that are not
    rotated are distributed to the ends of both halves, with an angle of zero. Products of queries and keys do not
    change if both use the same order.
    """
    if not rope.rotary_dim and not rope.interleaved:
        return None
    places, rotary_dim = torch.arange(head_dim), rope.rotary_dim or head_dim
    rotated, rest = places[:rotary_dim], places[rotary_dim:]
    first, second = (rotated[0::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    still, also_still = rest.tensor_split(2)
    return torch.cat((first, still, second, also_still))


class RopeTable:
    """cos and sin, float32 [max_len, head_dim / 2]. See `rotation_order` for partially rotated heads.

    `growth`, float32 [max_len]: factor of the queries; None if it is 1 at every position.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_len: int, device: torch.device, factors: Tensor | None = None
    ) -> None:
        frequencies = inverse_frequencies(rope, head_dim, factors)
        angles = torch.outer(torch.arange(max_len).float(), frequencies)
        cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
        rest = head_dim // 2 - len(frequencies)
        if rest:
            cos = torch.cat((cos, cos.new_ones(max_len, rest)), dim=1)
            sin = torch.cat((sin, sin.new_zeros(max_len, rest)), dim=1)
        self.cos, self.sin = cos.to(device), sin.to(device)
        self.growth: Tensor | None = None
        if rope.query_growth and max_len > rope.original_max_len:
            steps = torch.arange(max_len) // rope.original_max_len
            self.growth = (1 + rope.query_growth * torch.log1p(steps.float())).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin at positions int64 [T]: [T, head_dim / 2] each."""
        return self.cos[positions], self.sin[positions]
