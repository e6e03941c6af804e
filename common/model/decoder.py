"""The parts that all decoder families share: embedding, paged attention, gated MLP, final norm, and head if any."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.kv.cache import KVCache
from common.model.batch import ForwardBatch
from common.model.rope import RopeTable
from common.model.weights import LayerWeights, ModelWeights
from common.model_config.rope import RopeConfig
from common.model_files.config import ModelConfig
from kernels import AttentionPlan, NativePlan, Program, ProgramRecorder, paged_attention, record, rotate_and_write


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: see `ForwardBatch`; the cache; cos / sin [T, head_dim / 2] of each rotary embedding."""

    slots: Tensor
    sampled: Tensor | None
    plan: AttentionPlan
    kv: Tensor
    ropes: dict[RopeConfig, tuple[Tensor, Tensor]]


class Decoder(ABC):
    """A decoder-only model: configuration and weights, no state. Hidden states are flat, [T, hidden_size]."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._embedding_scale = torch.tensor(config.embedding_scale).to(self.dtype)  # rounded as transformers does
        self._ropes = {
            rope: RopeTable(rope, config.rope_dim, config.max_model_len, self.device, weights.rope_factors)
            for rope in set(config.layer_ropes)
        }
        self._program: Program | Literal[False] | None = None

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Writes the KV of the batch's tokens into their slots; returns logits float32 [num sampled, vocab_size].

        A model without a head returns its normed hidden states instead, float32 [num sampled, hidden_size].
        """
        if self._program is None and isinstance(batch.plan, NativePlan):
            self._program = record(self.dtype, lambda recorder: self._record(recorder, kv.tensor)) or False
        if self._program and isinstance(batch.plan, NativePlan):
            index = (batch.token_ids, batch.positions, batch.slots, batch.sampled)
            return self._finished(self._program.run(*index, kv.tensor, batch.plan))
        ropes = {rope: table.at(batch.positions) for rope, table in self._ropes.items()}
        step = Step(batch.slots, batch.sampled, batch.plan, kv.tensor, ropes)
        hidden = self.weights.embedding(batch.token_ids)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        return self._finished(self._headed(self.layers(hidden, step)))

    @property
    def quantization(self) -> str:
        """One of `Quantization`."""
        return self.weights.quantization.value

    @property
    def program(self) -> Program | None:
        """The program of a step, recorded in the first one; None where steps run operation by operation."""
        return self._program or None

    def run_by_operation(self) -> None:
        """Makes later steps run operation by operation, as on devices without programs."""
        self._program = False

    def _record(self, recorder: ProgramRecorder, kv: Tensor) -> Tensor:
        """Runs the layers on a recorder's slots; returns the slot of the logits, or of the hidden states."""
        ropes = {rope: recorder.rope(table.cos, table.sin) for rope, table in self._ropes.items()}
        step = Step(recorder.open, recorder.open, AttentionPlan(), kv, ropes)
        hidden = self.weights.embedding.record(recorder, float(self._embedding_scale))
        return self._headed(self.layers(hidden, step))

    @abstractmethod
    def layers(self, hidden: Tensor, step: Step) -> Tensor:
        """All layers: embedded tokens [T, hidden_size] to the normed hidden states of the sampled rows."""

    def attention(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        """Projections, rotary embedding, KV write and attention of one layer: [T or sampled, hidden_size]."""
        config, kv = self.config, step.kv
        q = rotate_and_write(
            weights.qkv(normed),
            *step.ropes[config.layer_ropes[index]],
            kv,
            index,
            step.slots,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=config.rms_norm_eps,
        )
        mixed = paged_attention(
            q,
            kv,
            index,
            step.plan,
            scale=config.attention_scale,
            window=config.layer_windows[index],
            softcap=config.attention_softcap,
            sinks=weights.sinks,
        )
        return weights.output(self.wanted(index, mixed.flatten(1), step))

    def mlp(self, weights: LayerWeights, normed: Tensor) -> Tensor:
        """Gated MLP of normed rows, or experts."""
        return weights.mlp(normed, self.config.activation)

    def wanted(self, index: int, rows: Tensor, step: Step) -> Tensor:
        """The rows that are computed further: after the last layer's attention only the sampled ones."""
        if index + 1 < self.config.num_layers or step.sampled is None:
            return rows
        return rows.index_select(0, step.sampled)

    def _headed(self, hidden: Tensor) -> Tensor:
        head = self.weights.lm_head
        return hidden if head is None else head(hidden, wide=True)

    def _finished(self, rows: Tensor) -> Tensor:
        cap = self.config.final_softcap
        if self.weights.lm_head is None:
            return rows.float()
        return torch.tanh(rows / cap) * cap if cap else rows
