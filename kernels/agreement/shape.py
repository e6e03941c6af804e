"""Model parameters that determine the shapes at which kernels are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.interface import UNSCALED, AttentionRule, KVScales


class LayerRule(NamedTuple):
    """A layer that represents all layers with the same attention rule."""

    layer: int
    rule: AttentionRule


@dataclass(frozen=True, slots=True)
class CheckedShape:
    """widths: of the gated MLPs, of one half each. longest: tokens of a sequence. Norms have weights float32.

    vocab_size 0: nothing is sampled. device_kernels: the kernels are a GPU's, so a negative slot is a row that
    writes nothing, and blocks are copied by kernels, also in 8 bits with `quantised_wire`. latent_dim: numbers of a
    latent, 0 for keys and values; query_dim: of a query head before it meets latents. scales: of the last layer.
    """

    num_heads: int
    rules: Sequence[LayerRule]
    dtype: torch.dtype
    hidden_size: int
    widths: Sequence[int]
    activation: str
    vocab_size: int
    eps: float
    longest: int
    qk_norm: bool = False
    wide_qk_norm: bool = False
    device_kernels: bool = False
    quantised_wire: bool = False
    latent_dim: int = 0
    query_dim: int = 0
    scales: KVScales = UNSCALED
