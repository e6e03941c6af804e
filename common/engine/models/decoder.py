"""Base class of decoders: embedding, paged attention, gated MLP, final norm, and the head if there is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from common.engine.kv import KVCache
from common.engine.models.batch import ForwardBatch
from common.engine.models.lora import LayerSites, StepChanges, layer_sites
from common.engine.models.mlp import MLP
from common.engine.models.rope import RopeTable
from common.engine.models.tensor_parallel import TensorParallel
from common.engine.models.weights import LayerWeights, ModelWeights
from common.errors import ModelError
from common.model_files import ModelConfig
from common.model_files.architecture import RopeConfig
from kernels import (
    AttentionPlan,
    KVScales,
    LoraChange,
    LoraRows,
    LoraSite,
    NativePlan,
    Program,
    ProgramRecorder,
    paged_attention,
    record,
    rotate_and_write,
)


class LayerStates:
    """Collects the inputs of the layers `wanted` during a step, [T, hidden_size] each, before their norms.

    Draft heads may read them. The index `num_layers` denotes the input of the final norm, which may contain only the
    sampled rows.
    """

    def __init__(self, wanted: Sequence[int]) -> None:
        self._wanted = wanted
        self._found: dict[int, Tensor] = {}

    def record(self, layer: int, hidden: Tensor) -> None:
        """Record `hidden`, the input of a layer, if it is wanted."""
        if layer in self._wanted:
            self._found[layer] = hidden

    def in_order(self) -> tuple[Tensor, ...]:
        """Return the inputs in the order of `wanted`."""
        return tuple(self._found[layer] for layer in self._wanted)


@dataclass(frozen=True, slots=True)
class Step:
    """Shared state of one forward pass.

    See `ForwardBatch` for `slots`, `sampled` and `plan`. `kv` is the cache, `scales` its scales per layer. `ropes` has
    cos and sin, [T, head_dim / 2], of each rotary embedding. `growth`, [T, 1, 1], multiplies the queries of rotary
    embeddings that scale them. `changes` are those of adapters, None if no row uses one.
    """

    slots: Tensor
    sampled: Tensor | None
    plan: AttentionPlan
    kv: Tensor
    scales: Sequence[KVScales]
    ropes: dict[RopeConfig, tuple[Tensor, Tensor]]
    states: LayerStates
    changes: StepChanges | None = None
    growth: Mapping[RopeConfig, Tensor] = field(default_factory=dict)


class Decoder(ABC):
    """Decoder-only model: configuration and weights, without state. Hidden states are flat, [T, hidden_size]."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._embedding_scale = config.embedding_scale
        if config.family.embeds_by_width:  # round like transformers
            self._embedding_scale = float(torch.tensor(config.embedding_scale).to(self.dtype))
        self._ropes = {
            rope: RopeTable(rope, config.rope_dim, config.max_model_len, self.device, weights.rope_factors)
            for rope in set(config.layer_ropes)
        }
        self._program: Program | Literal[False] | None = None
        self._adapted: Program | Literal[False] | None = None  # the program with adapters
        self._recorded_scales: Sequence[KVScales] = ()  # of the cache for which the programs were recorded
        self._sites: tuple[LayerSites, ...] = ()
        self._ranks: TensorParallel | None = None
        self._states_of: tuple[int, ...] = ()
        if any(table.growth is not None for table in self._ropes.values()):
            self.run_by_operation()  # programs cannot scale queries by position

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the KV of the batch's tokens and return logits, float32 [num sampled, vocab_size].

        A model without a head returns its normed hidden states instead, float32 [num sampled, hidden_size].
        """
        return self._finished(self.rows(batch, kv))

    def rows(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Like `forward`, but with hidden states in the model's dtype and logits before soft-capping."""
        return self.rows_and_states(batch, kv)[0]

    def rows_and_states(self, batch: ForwardBatch, kv: KVCache) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Like `rows`, and also return the hidden states requested by `keep_states`, in its order."""
        if batch.adapters is not None and not self._sites:
            raise ModelError("the step uses adapters, but no adapters are enabled for this model")
        program = self._program_for(batch, kv)
        if program and isinstance(batch.plan, NativePlan):
            index = (batch.token_ids, batch.positions, batch.slots, batch.sampled)
            return program.run(*index, kv.tensor, batch.plan, batch.adapters)
        hidden = self._embedded(batch.token_ids)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        step = self.step(batch, kv)
        return self._headed(self.layers(hidden, step)), step.states.in_order()

    def step(self, batch: ForwardBatch, kv: KVCache) -> Step:
        """Build the state shared by all layers, for a step that runs operation by operation."""
        ropes = {rope: table.at(batch.positions) for rope, table in self._ropes.items()}
        growth = {
            rope: table.growth[batch.positions].to(self.dtype)[:, None, None]
            for rope, table in self._ropes.items()
            if table.growth is not None
        }
        states, changes = LayerStates(self._states_of), self._changes(batch)
        return Step(batch.slots, batch.sampled, batch.plan, kv.tensor, kv.scales, ropes, states, changes, growth)

    @property
    def quantization(self) -> str:
        """Value of `Quantization`."""
        return self.weights.quantization.value

    @property
    def program(self) -> Program | None:
        """The step program recorded in the first step; None if steps run operation by operation."""
        return self._program or None

    def keep_states(self, layers: Sequence[int]) -> None:
        """Make steps keep the inputs of `layers`; see `LayerStates`. Call it before the first step."""
        self._states_of = tuple(layers)

    def run_by_operation(self) -> None:
        """Make later steps run operation by operation, as on devices without programs."""
        self._program = self._adapted = False

    def join_ranks(self, ranks: TensorParallel) -> None:
        """Make this decoder one rank's part of a model. All ranks compute the same steps concurrently."""
        self._ranks = ranks
        self.run_by_operation()  # a program is a single call and cannot include sums over ranks

    def add_sites(self, max_loras: int, max_rank: int) -> tuple[LayerSites, ...]:
        """Create slots for `max_loras` adapters. Their contents are added for rows that name the slot."""
        self._sites = tuple(
            layer_sites(self.config, layer, max_loras, max_rank, self.dtype, self.device)
            for layer in self.weights.layers
        )
        return self._sites

    def _program_for(self, batch: ForwardBatch, kv: KVCache) -> Program | Literal[False] | None:
        """Return the program for this step. Steps without adapters use a separate program."""
        if not isinstance(batch.plan, NativePlan):
            return None
        if self._recorded_scales is not kv.scales:
            self._forget_programs(kv.scales)
        if batch.adapters is None:
            if self._program is None:
                self._program = record(self.dtype, lambda recorder: self._record(recorder, kv)) or False
            return self._program
        if self._adapted is None:
            changes = StepChanges(self._sites, None, None)
            self._adapted = record(self.dtype, lambda recorder: self._record(recorder, kv, changes)) or False
        return self._adapted

    def _forget_programs(self, scales: Sequence[KVScales]) -> None:
        """Drop recorded programs if the cache's scales changed, because they contain the scales."""
        if scales != self._recorded_scales:
            if self._program:
                self._program = None
            if self._adapted:
                self._adapted = None
        self._recorded_scales = scales

    def _changes(self, batch: ForwardBatch) -> StepChanges | None:
        if batch.adapters is None:
            return None
        rows = LoraRows(batch.adapters)
        return StepChanges(self._sites, rows, rows if batch.sampled is None else rows.select(batch.sampled))

    def _record(self, recorder: ProgramRecorder, kv: KVCache, changes: StepChanges | None = None) -> Tensor:
        """Run the layers on a recorder's slots. Returns the slot of the logits or hidden states."""
        ropes = {rope: recorder.rope(table.cos, table.sin) for rope, table in self._ropes.items()}
        states = LayerStates(self._states_of)
        step = Step(recorder.open, recorder.open, AttentionPlan(), kv.tensor, kv.scales, ropes, states, changes)
        hidden = self.weights.embedding.record(recorder, self._embedding_scale)
        rows = self._headed(self.layers(hidden, step))
        recorder.yield_rows(states.in_order())
        return rows

    @abstractmethod
    def layers(self, hidden: Tensor, step: Step) -> Tensor:
        """Run all layers: embedded tokens [T, hidden_size] to the normed hidden states of the sampled rows."""

    def attention(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        """Run projections, rotary embedding, KV write and attention of one layer: [T or sampled, hidden_size]."""
        config, scales = self.config, step.scales[index]
        q = self.write_kv(index, weights, normed, step)
        growth = step.growth.get(config.layer_ropes[index])
        mixed = paged_attention(
            q if growth is None else q * growth,
            step.kv,
            index,
            step.plan,
            scale=config.attention_scale,
            window=config.layer_windows[index],
            softcap=config.attention_softcap,
            sinks=weights.sinks,
            k_scale=scales.key,
            v_scale=scales.value,
            batch_invariant=weights.output.batch_invariant,
        )
        rows = self.wanted(index, mixed.flatten(1), step)
        return self._summed(weights.output(rows, change=self._change(step, index, "output")))

    def write_kv(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        """Run the first half of one layer's attention: write keys and values to the cache and return the queries."""
        config, scales = self.config, step.scales[index]
        qkv = weights.qkv(normed, change=self._change(step, index, "qkv"))
        is_normed = config.wide_qk_norm and self._ranks is not None
        if is_normed:
            qkv = self._normed_over_ranks(qkv, weights)
        return rotate_and_write(
            qkv,
            *step.ropes[config.layer_ropes[index]],
            step.kv,
            index,
            step.slots,
            q_norm=None if is_normed else weights.q_norm,
            k_norm=None if is_normed else weights.k_norm,
            eps=config.rms_norm_eps,
            k_scale=scales.key,
            v_scale=scales.value,
        )

    def _normed_over_ranks(self, qkv: Tensor, weights: LayerWeights) -> Tensor:
        """Normalise the query heads of all ranks together, likewise the key heads. Returns qkv."""
        assert self._ranks is not None and weights.q_norm is not None and weights.k_norm is not None
        eps, kv_width = self.config.rms_norm_eps, len(weights.k_norm)
        q, k, v = torch.split(qkv, [len(weights.q_norm), kv_width, kv_width], dim=1)
        return torch.cat((self._ranks.normed(q, weights.q_norm, eps), self._ranks.normed(k, weights.k_norm, eps), v), 1)

    def mlp(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        """Run the gated MLP, or the experts, on normed rows."""
        if step.changes is None or not isinstance(weights.mlp, MLP):
            return self._summed(weights.mlp(normed, self.config.activation))
        changes = (self._change(step, index, site) for site in ("gate_up", "down"))
        return self._summed(weights.mlp(normed, self.config.activation, *changes))

    def _change(self, step: Step, index: int, name: Literal["qkv", "output", "gate_up", "down"]) -> LoraChange | None:
        """Return the adapter change at one matrix in this step."""
        if step.changes is None:
            return None
        site: LoraSite | None = getattr(self._sites[index], name)
        return step.changes.at(site, index, after_attention=name != "qkv")

    def wanted(self, index: int, rows: Tensor, step: Step) -> Tensor:
        """Return the rows that are computed further: only the sampled ones after the last layer's attention."""
        if index + 1 < self.config.num_layers or step.sampled is None:
            return rows
        return rows.index_select(0, step.sampled)

    def _headed(self, hidden: Tensor) -> Tensor:
        head = self.weights.lm_head
        if head is None:
            return hidden
        logits = head(hidden, wide=True)
        return logits if self._ranks is None else self._ranks.joined(logits)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        embedding = self.weights.embedding
        return embedding(token_ids) if self._ranks is None else self._ranks.embedded(embedding, token_ids)

    def _summed(self, rows: Tensor) -> Tensor:
        """Sum the parts of all ranks."""
        return rows if self._ranks is None else self._ranks.summed(rows)

    def capped(self, logits: Tensor) -> Tensor:
        """Apply the model's logit soft-capping, for logits that were not computed by `forward`."""
        cap = self.config.final_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _finished(self, rows: Tensor) -> Tensor:
        return rows.float() if self.weights.lm_head is None else self.capped(rows)
