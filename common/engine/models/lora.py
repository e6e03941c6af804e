"""LoRA sites of a decoder's layers, with the shapes of their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.engine.models.mlp import MLP
from common.engine.models.weights import LayerWeights
from common.model_files import ModelConfig
from kernels import Linear, LoraChange, LoraRows, LoraSite


@dataclass(frozen=True, slots=True)
class LayerSites:
    """Matrices of a layer that adapters may change. A layer of experts has no MLP sites."""

    qkv: LoraSite
    output: LoraSite
    gate_up: LoraSite | None = None
    down: LoraSite | None = None


@dataclass(frozen=True, slots=True)
class StepChanges:
    """Sites of all layers, and the adapters of a step's rows (None while a program is recorded).

    `sampled`: adapters of the rows computed after the last layer's attention.
    """

    layers: tuple[LayerSites, ...]
    rows: LoraRows | None
    sampled: LoraRows | None

    def at(self, site: LoraSite | None, layer: int, *, after_attention: bool) -> LoraChange | None:
        """Return the change at one product."""
        if site is None:
            return None
        is_sampled = after_attention and layer + 1 == len(self.layers)
        return LoraChange(site, self.sampled if is_sampled else self.rows)


def layer_sites(
    config: ModelConfig,
    weights: LayerWeights,
    max_loras: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerSites:
    """Create the empty sites of one layer."""
    kv = config.num_kv_heads * config.head_dim

    def site(linear: Linear, parts: tuple[int, ...]) -> LoraSite:
        panels = linear.native is not None and linear.native.gated
        return LoraSite(
            linear.in_features,
            parts,
            max_loras=max_loras,
            max_rank=max_rank,
            panels=panels,
            dtype=dtype,
            device=device,
            batch_invariant=linear.batch_invariant,
        )

    qkv = site(weights.qkv, (config.num_heads * config.head_dim, kv, kv))
    output = site(weights.output, (config.hidden_size,))
    if not isinstance(weights.mlp, MLP):
        return LayerSites(qkv, output)
    inner = weights.mlp.gate_up.out_features // 2
    return LayerSites(
        qkv, output, site(weights.mlp.gate_up, (inner, inner)), site(weights.mlp.down, (config.hidden_size,))
    )
