"""Rotary position embedding: tables of cosines and sines for every position a model takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.model_files.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """Angles per position, float32 [head_dim / 2]. `factors` of the file (llama.cpp's rope_freqs) divide them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if factors is not None:
        return frequencies / factors
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: slows long waves by `factor`, keeps short ones, interpolates between them."""
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


class RopeTable:
    """cos and sin, float32 [max_len, head_dim / 2]."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_len: int, device: torch.device, factors: Tensor | None = None
    ) -> None:
        angles = torch.outer(torch.arange(max_len).float(), inverse_frequencies(rope, head_dim, factors))
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at int64 [T] positions: [T, head_dim / 2] each."""
        return self.cos[positions], self.sin[positions]
