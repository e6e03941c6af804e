"""The parts that all decoder families share: embedding, paged attention, gated MLP, final norm, and head if any."""

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
    """Of one step: the inputs of the layers `wanted`, [T, hidden_size] each, before any norm of theirs.

    A draft head may read them. The number of layers stands for the input of the final norm, of which there may be the
    sampled rows alone.
    """

    def __init__(self, wanted: Sequence[int]) -> None:
        self._wanted = wanted
        self._found: dict[int, Tensor] = {}

    def pass_by(self, layer: int, hidden: Tensor) -> None:
        """`hidden` is the layer's input."""
        if layer in self._wanted:
            self._found[layer] = hidden

    def in_order(self) -> tuple[Tensor, ...]:
        """As they were wanted."""
        return tuple(self._found[layer] for layer in self._wanted)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: see `ForwardBatch`; the cache, and the scales of each layer in it; cos / sin [T, head_dim / 2]
    of each rotary embedding.

    `growth` [T, 1, 1] multiplies queries, by rotary embedding, where one grows them. `changes` are those of adapters,
    None where no row has one.
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
    """A decoder-only model: configuration and weights, no state. Hidden states are flat, [T, hidden_size]."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._embedding_scale = config.embedding_scale
        if config.family.embeds_by_width:  # rounded as transformers does
            self._embedding_scale = float(torch.tensor(config.embedding_scale).to(self.dtype))
        self._ropes = {
            rope: RopeTable(rope, config.rope_dim, config.max_model_len, self.device, weights.rope_factors)
            for rope in set(config.layer_ropes)
        }
        self._program: Program | Literal[False] | None = None
        self._adapted: Program | Literal[False] | None = None  # the same with what adapters add
        self._recorded_scales: Sequence[KVScales] = ()  # of the cache that they are for
        self._sites: tuple[LayerSites, ...] = ()
        self._ranks: TensorParallel | None = None
        self._states_of: tuple[int, ...] = ()
        if any(table.growth is not None for table in self._ropes.values()):
            self.run_by_operation()  # a program has no product of queries and what grows with their positions

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Writes the KV of the batch's tokens into their slots; returns logits float32 [num sampled, vocab_size].

        A model without a head returns its normed hidden states instead, float32 [num sampled, hidden_size].
        """
        return self._finished(self.rows(batch, kv))

    def rows(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """As `forward`, but hidden states in the model's type, and logits before they are capped."""
        return self.rows_and_states(batch, kv)[0]

    def rows_and_states(self, batch: ForwardBatch, kv: KVCache) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `rows`, and the hidden states that `keep_states` asked for, in its order."""
        if batch.adapters is not None and not self._sites:
            raise ModelError("a step names adapters, and this model has none")
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
        """What all layers share in a step that runs operation by operation."""
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
        """One of `Quantization`."""
        return self.weights.quantization.value

    @property
    def program(self) -> Program | None:
        """The program of a step, recorded in the first one; None where steps run operation by operation."""
        return self._program or None

    def keep_states(self, layers: Sequence[int]) -> None:
        """Makes steps keep the inputs of `layers`, see `LayerStates`. Call it before the first step."""
        self._states_of = tuple(layers)

    def run_by_operation(self) -> None:
        """Makes later steps run operation by operation, as on devices without programs."""
        self._program = self._adapted = False

    def join_ranks(self, ranks: TensorParallel) -> None:
        """Makes this one rank's part of a model, whose other parts compute the same steps at the same time."""
        self._ranks = ranks
        self.run_by_operation()  # a program is one call, without room for sums over ranks

    def add_sites(self, max_loras: int, max_rank: int) -> tuple[LayerSites, ...]:
        """Makes places for `max_loras` adapters: what is put into these sites is added for rows that name a place."""
        self._sites = tuple(
            layer_sites(self.config, layer, max_loras, max_rank, self.dtype, self.device)
            for layer in self.weights.layers
        )
        return self._sites

    def _program_for(self, batch: ForwardBatch, kv: KVCache) -> Program | Literal[False] | None:
        """The program of such a step. Steps without adapters keep theirs, whatever adapters there are."""
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
        """Programs hold the scales of the cache that they were recorded for, and serve others that have the same."""
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
        """Runs the layers on a recorder's slots; returns the slot of the logits, or of the hidden states."""
        ropes = {rope: recorder.rope(table.cos, table.sin) for rope, table in self._ropes.items()}
        states = LayerStates(self._states_of)
        step = Step(recorder.open, recorder.open, AttentionPlan(), kv.tensor, kv.scales, ropes, states, changes)
        hidden = self.weights.embedding.record(recorder, self._embedding_scale)
        rows = self._headed(self.layers(hidden, step))
        recorder.yield_rows(states.in_order())
        return rows

    @abstractmethod
    def layers(self, hidden: Tensor, step: Step) -> Tensor:
        """All layers: embedded tokens [T, hidden_size] to the normed hidden states of the sampled rows."""

    def attention(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        """Projections, rotary embedding, KV write and attention of one layer: [T or sampled, hidden_size]."""
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
        """The first half of one layer's attention: keys and values go into the cache; returns the queries."""
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
        """qkv with the query heads of all ranks normalised as one, and their key heads."""
        assert self._ranks is not None and weights.q_norm is not None and weights.k_norm is not None
        eps, kv_width = self.config.rms_norm_eps, len(weights.k_norm)
        q, k, v = torch.split(qkv, [len(weights.q_norm), kv_width, kv_width], dim=1)
        return torch.cat((self._ranks.normed(q, weights.q_norm, eps), self._ranks.normed(k, weights.k_norm, eps), v), 1)

    def mlp(self, index: int, weights: LayerWeights, normed: Tensor, step: Step) -> Tensor:
        """Gated MLP of normed rows, or experts."""
        if step.changes is None or not isinstance(weights.mlp, MLP):
            return self._summed(weights.mlp(normed, self.config.activation))
        changes = (self._change(step, index, site) for site in ("gate_up", "down"))
        return self._summed(weights.mlp(normed, self.config.activation, *changes))

    def _change(self, step: Step, index: int, name: Literal["qkv", "output", "gate_up", "down"]) -> LoraChange | None:
        """What adapters change at one matrix in this step."""
        if step.changes is None:
            return None
        site: LoraSite | None = getattr(self._sites[index], name)
        return step.changes.at(site, index, after_attention=name != "qkv")

    def wanted(self, index: int, rows: Tensor, step: Step) -> Tensor:
        """The rows that are computed further: after the last layer's attention only the sampled ones."""
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
        """The sum of all ranks' parts of `rows`."""
        return rows if self._ranks is None else self._ranks.summed(rows)

    def capped(self, logits: Tensor) -> Tensor:
        """Logits as the model says them, if something else than `forward` made them of its hidden states."""
        cap = self.config.final_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _finished(self, rows: Tensor) -> Tensor:
        return rows.float() if self.weights.lm_head is None else self.capped(rows)
