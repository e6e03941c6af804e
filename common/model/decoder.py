"""What all decoder families share: embedding, attention over the paged cache, gated MLP, final norm and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from diptych.common.model.batch import ForwardBatch
from diptych.common.model.config import ModelConfig, RopeConfig
from diptych.common.model.kv_cache import KVCache
from diptych.common.model.rope import RopeTable
from diptych.common.model.weights import LayerWeights, ModelWeights
from diptych.kernels import gated, paged_attention, rms_norm, rotate, write_kv


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: the batch, the cache, and cos / sin [T, head_dim / 2] of each kind of rotary embedding."""

    batch: ForwardBatch
    kv: KVCache
    ropes: dict[RopeConfig, tuple[Tensor, Tensor]]


class Decoder(ABC):
    """A decoder-only model: configuration and weights, no state. Hidden states are flat, [T, hidden_size]."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._embedding_scale = torch.tensor(config.embedding_scale).to(self.dtype)  # rounded as transformers does
        self._ropes = {
            rope: RopeTable(rope, config.head_dim, config.max_model_len, self.device, weights.rope_factors)
            for rope in set(config.layer_ropes)
        }

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the KV of the batch's tokens into their slots; logits float32 [num sampled, vocab_size]."""
        ropes = {rope: table.at(batch.positions) for rope, table in self._ropes.items()}
        step = Step(batch, kv, ropes)
        hidden = functional.embedding(batch.token_ids, self.weights.embedding)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for index, layer in enumerate(self.weights.layers):
            hidden = self.layer(index, layer, hidden, step)
        return self._logits(hidden)

    @abstractmethod
    def layer(self, index: int, weights: LayerWeights, hidden: Tensor, step: Step) -> Tensor:
        """One layer. The last one returns the sampled rows only."""

    def attention(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        """Projections, rotary embedding, KV write and attention of one layer: [T or sampled, hidden_size]."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = functional.linear(normed, weights.qkv, weights.qkv_bias)
        qkv = qkv.view(-1, heads + 2 * kv_heads, config.head_dim)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = rms_norm(qkv[:, :heads], weights.q_norm, config.rms_norm_eps)
            k = rms_norm(qkv[:, heads : heads + kv_heads], weights.k_norm, config.rms_norm_eps)
            qk = torch.cat((q, k), dim=1)
        else:
            qk = qkv[:, : heads + kv_heads]
        qk = rotate(qk, *step.ropes[config.layer_ropes[index]])
        write_kv(step.kv.tensor, index, step.batch.slots, qk[:, heads:], qkv[:, heads + kv_heads :])
        mixed = paged_attention(
            qk[:, :heads],
            step.kv.tensor,
            index,
            step.batch.plans[config.layer_windows[index]],
            scale=config.attention_scale,
            softcap=config.attention_softcap,
        )
        mixed = self.wanted(index, mixed.flatten(1), step)
        return functional.linear(mixed, weights.output, weights.output_bias)

    def mlp(self, weights: LayerWeights, normed: Tensor) -> Tensor:
        """Gated MLP of normed rows."""
        gate_up = functional.linear(normed, weights.gate_up, weights.gate_up_bias)
        return functional.linear(gated(gate_up, self.config.activation), weights.down, weights.down_bias)

    def wanted(self, index: int, rows: Tensor, step: Step) -> Tensor:
        """After the last layer's attention only the sampled rows matter."""
        if index + 1 < self.config.num_layers or step.batch.sampled is None:
            return rows
        return rows.index_select(0, step.batch.sampled)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        logits = functional.linear(normed, self.weights.lm_head).float()
        if self.config.final_softcap:
            logits = torch.tanh(logits / self.config.final_softcap) * self.config.final_softcap
        return logits
