"""Weights of a decoder, assembled for the forward pass: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.mlp import FeedForward, MixtureOfExperts, SharedExpert
from common.engine.models.rope import rotation_order
from common.engine.models.tensor_reader import TensorReader, reordered
from common.model_files import Quantization
from common.model_files.architecture import ExpertsConfig, ExpertStack, LatentConfig
from common.model_files.families import NormPlace
from kernels import Embedding, Expert, Experts, HeadLinear, Linear, Routing, Weight


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention, in addition to the query matrix `LayerWeights.qkv`.

    query_down and query_norm: hidden states to the latents of queries; both None if queries have no latents.
    down: hidden states to rank + rope_dim. norm: over the first `rank`. absorb: maps each head's `nope_dim` query
    elements to `rank`, the transpose of the key projection. expand: maps sums of `rank` to `value_dim`.
    """

    query_down: Linear | None
    query_norm: Tensor | None
    down: Linear
    norm: Tensor
    absorb: HeadLinear
    expand: HeadLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. Norm weights are float32. Weights that a family does not have are None.

    norms: norms of hidden states, by place.
    qkv: hidden to (num_heads + 2 * num_kv_heads) * head_dim; with `latent`, only queries.
    q_norm, k_norm: per head, or over all heads with `wide_qk_norm`.
    """

    norms: Mapping[NormPlace, Tensor]
    qkv: Linear
    output: Linear
    mlp: FeedForward
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding: [vocab, hidden], shared with lm_head if tied. rope_factors: see `rope`.

    Without an lm_head, the model returns hidden states. quantization: of the matrices.
    """

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear | None
    rope_factors: Tensor | None = None
    quantization: Quantization = Quantization.NONE


class Assembler(TensorReader):
    """Reads a source into `ModelWeights`."""

    def assemble(self, *, with_head: bool = True) -> ModelWeights:
        """Read all weights; without `with_head`, omit the language model head."""
        config = self.config
        embedding, head = self.embedding(with_head)
        norm = self.norm("model.norm.weight", config.hidden_size)
        if with_head:
            norm = norm / config.logits_divisor  # dividing the input of the head divides the logits
        layers = tuple(self.layer(i) for i in range(config.num_layers))
        factors = self.source.read("rope_factors").float() if self.source.has("rope_factors") else None
        return ModelWeights(embedding, layers, norm, head, factors, self.quantization)

    def embedding(self, with_head: bool) -> tuple[Embedding, Linear | None]:
        """Read the embedding and the head, which are the same matrix in a tied model."""
        config = self.config
        table = self.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if not with_head:
            return Embedding(table), None
        if self.quantization is Quantization.NONE and config.tie_embeddings:
            head = self.product(Linear, table)
            return Embedding.tied(table, head), head
        name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        weight = self.weight({name: config.vocab_size}, config.hidden_size, self.quantization.head)
        return Embedding(table), self.product(Linear, weight)

    def layer(
        self,
        index: int,
        number: int | None = None,
        columns: int | None = None,
        norms: Mapping[NormPlace, str] | None = None,
    ) -> LayerWeights:
        """Read layer `index` of the configuration. `number`: its index in the file, if different.

        `columns`: input size of the q, k and v matrices, if they read more than hidden states. `norms`: norm names by
        place, if different from the family's.
        """
        config, hidden = self.config, self.config.hidden_size
        prefix, q = f"model.layers.{index if number is None else number}.", config.num_heads * config.value_dim
        order = None if config.latent else rotation_order(config.layer_ropes[index], config.head_dim)
        latents = None if config.latent is None else LatentReader(self, config.latent, f"{prefix}self_attn.")
        names = config.family.norms if norms is None else norms
        return LayerWeights(
            norms={place: self.norm(f"{prefix}{name}.weight", hidden) for place, name in names.items()},
            qkv=self.attention_inputs(prefix, order, columns or hidden) if latents is None else latents.queries(),
            output=self.linear(Linear, prefix, {"self_attn.o_proj": hidden}, q, config.output_bias),
            mlp=self.feed_forward(index, prefix),
            q_norm=self.head_norm(f"{prefix}self_attn.q_norm.weight", config.num_heads, order),
            k_norm=self.head_norm(f"{prefix}self_attn.k_norm.weight", config.num_kv_heads, order),
            sinks=self.sinks(f"{prefix}self_attn.sinks"),
            latent=None if latents is None else latents.read(),
        )

    def attention_inputs(self, prefix: str, order: Tensor | None, columns: int) -> Linear:
        """Read q, k and v with `columns` inputs. `order`: permutation of query and key heads, see `rotation_order`."""
        config, dim = self.config, self.config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        if config.fused_qkv:
            parts = {"self_attn.qkv_proj": q + 2 * kv}
        rows = None
        if order is not None:
            heads = torch.arange(config.num_heads + config.num_kv_heads)[:, None] * dim
            rows = torch.cat(((heads + order).flatten(), torch.arange(q + kv, q + 2 * kv)))
        return self.linear(Linear, prefix, parts, columns, config.qkv_bias, rows)

    def feed_forward(self, index: int, prefix: str) -> FeedForward:
        config = self.config
        if config.experts is not None and config.experts.layers[index]:
            return ExpertsReader(self, config.experts, prefix).read()
        return self.mlp(f"{prefix}mlp.", config.intermediate_size)

    def sinks(self, name: str) -> Tensor | None:
        config = self.config
        return self.checked(name, (config.num_heads,)).float().to(self.device).contiguous() if config.sinks else None

    def head_norm(self, name: str, heads: int, order: Tensor | None) -> Tensor | None:
        """Read the norm of each head, or of `heads` heads together."""
        config, count = self.config, heads if self.config.wide_qk_norm else 1
        if not config.qk_norm and not config.wide_qk_norm:
            return None
        weight = self.norm(name, count * config.head_dim)
        if order is None:
            return weight
        return weight.view(count, config.head_dim)[:, order.to(weight.device)].flatten()


class LatentReader:
    """Reads the attention weights of one layer with tensor name prefix `prefix`.

    Rows of rotated elements are permuted for the kernels, which rotate element i with i + rope_dim / 2.
    """

    def __init__(self, reader: TensorReader, latent: LatentConfig, prefix: str) -> None:
        self.reader, self.latent, self.prefix = reader, latent, prefix
        self.heads, self.hidden = reader.config.num_heads, reader.config.hidden_size
        places = torch.arange(latent.rope_dim)
        self.order = torch.cat((places[0::2], places[1::2])) if latent.interleaved else places

    def queries(self) -> Linear:
        """Read the query matrix, to num_heads * query_dim, from hidden states or latents."""
        latent = self.latent
        each = torch.cat((torch.arange(latent.nope_dim), latent.nope_dim + self.order))
        rows = (torch.arange(self.heads)[:, None] * latent.query_dim + each).flatten()
        name, width = ("q_b_proj", latent.query_rank) if latent.query_rank else ("q_proj", self.hidden)
        return self.reader.linear(Linear, self.prefix, {name: len(rows)}, width, False, rows)

    def read(self) -> LatentWeights:
        latent, source = self.latent, self.reader
        query_down: Linear | None = None
        query_norm: Tensor | None = None
        biased = source.config.output_bias
        if latent.query_rank:
            query_down = source.linear(Linear, self.prefix, {"q_a_proj": latent.query_rank}, self.hidden, biased)
            query_norm = source.norm(f"{self.prefix}q_a_layernorm.weight", latent.query_rank)
        rows = torch.cat((torch.arange(latent.rank), latent.rank + self.order))
        down = source.linear(
            Linear, self.prefix, {"kv_a_proj_with_mqa": latent.key_dim}, self.hidden, biased, order=rows
        )
        norm = source.norm(f"{self.prefix}kv_a_layernorm.weight", latent.rank)
        return LatentWeights(query_down, query_norm, down, norm, *self._heads())

    def _heads(self) -> tuple[HeadLinear, HeadLinear]:
        """Read `absorb` and `expand`, one matrix in the file, in the model's dtype."""
        latent, each = self.latent, self.latent.nope_dim + self.latent.value_dim
        whole = self.reader.matrix(f"{self.prefix}kv_b_proj.weight", self.heads * each, latent.rank)
        whole = whole.view(self.heads, each, latent.rank)
        keys, values = whole[:, : latent.nope_dim], whole[:, latent.nope_dim :]
        parts, invariant = (keys.transpose(1, 2).contiguous(), values.contiguous()), self.reader.batch_invariant
        return HeadLinear(parts[0], batch_invariant=invariant), HeadLinear(parts[1], batch_invariant=invariant)


class ExpertsReader:
    """Reads the experts of one layer with tensor name prefix `prefix`."""

    def __init__(self, reader: TensorReader, config: ExpertsConfig, prefix: str) -> None:
        self.reader, self.config, self.prefix = reader, config, prefix
        self.hidden, self.inner = reader.config.hidden_size, config.intermediate_size
        self.names = reader.config.family.experts

    def read(self) -> MixtureOfExperts:
        config, source = self.config, self.reader
        name = self.prefix + self.names.router
        bias = source.bias({f"{name}.bias": config.count}) if config.biased else None
        router = source.product(Linear, source.matrix(f"{name}.weight", config.count, self.hidden), bias)
        stack = self.names.stack
        if stack is not None and source.source.has(self.prefix + stack.gate_up):
            experts = self._stacked(stack)
        else:  # always the case in GGUF files
            experts = [self._expert(i) for i in range(config.count)]
        made = Experts(experts, dtype=source.dtype, batch_invariant=source.batch_invariant)
        return MixtureOfExperts(router, made, self._routing(name), self._shared())

    def _routing(self, router: str) -> Routing:
        config, source = self.config, self.reader
        correction: Tensor | None = None
        if config.corrected:
            own = self.names.correction
            holder = f"{self.prefix}{own}" if own else router
            found = source.checked(f"{holder}.e_score_correction_bias", (config.count,), (1, config.count)).flatten()
            correction = found.to(device=source.device, dtype=torch.float32).contiguous()
        return Routing(
            config.per_token,
            config.normalised,
            config.sigmoid,
            correction,
            config.groups,
            config.kept_groups,
            config.scale,
        )

    def _expert(self, index: int) -> Expert:
        """Read an expert whose matrices are separate tensors."""
        source, name = self.reader, f"{self.prefix}{self.names.module}.{index}."
        gates = {f"{name}{part}": self.inner for part in self.names.gates}
        return Expert(
            source.weight(_named(gates, "weight"), self.hidden, source.quantization),
            source.weight({f"{name}{self.names.down}.weight": self.hidden}, self.inner, source.quantization),
            source.bias(_named(gates, "bias")) if self.config.biased else None,
            source.bias({f"{name}{self.names.down}.bias": self.hidden}) if self.config.biased else None,
        )

    def _stacked(self, stack: ExpertStack) -> list[Expert]:
        """Read experts stored in one tensor. The name of the biases has the suffix "_bias"."""
        count, gates, downs = self.config.count, self.prefix + stack.gate_up, self.prefix + stack.down
        gate_up = self._matrices(stack, gates, 2 * self.inner, self.hidden)
        down = self._matrices(stack, downs, self.hidden, self.inner)
        biases: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * count
        if self.config.biased:
            of_gates = self.reader.matrix(f"{gates}_bias", count, 2 * self.inner)
            of_downs = self.reader.matrix(f"{downs}_bias", count, self.hidden)
            biases = list(zip(of_gates, of_downs, strict=True))
        if stack.alternating:
            rows = torch.arange(2 * self.inner, device=self.reader.device).view(self.inner, 2).T.flatten()
            gate_up = [reordered(one, rows) for one in gate_up]  # gates, then ups
            biases = [(None if first is None else first[rows], second) for first, second in biases]
        return [Expert(gate_up[i], down[i], *biases[i]) for i in range(count)]

    def _matrices(self, stack: ExpertStack, name: str, outputs: int, inputs: int) -> Sequence[Weight]:
        """Read the matrix [out, in] of each expert."""
        reader, count = self.reader, self.config.count
        if (held := reader.held_stack(name, count, outputs, inputs)) is not None:
            return held
        in_file = reader.source.is_quantised(name)
        dense = reader.checked(name, (count, outputs, inputs), *([] if in_file else [(count, inputs, outputs)]))
        if not in_file and stack.is_turned(dense.shape, outputs, inputs):
            dense = dense.transpose(1, 2)
        return [reader.as_asked(one, in_file) for one in dense]

    def _shared(self) -> SharedExpert | None:
        if not self.config.shared_size:
            return None
        if not self.config.shared_gated:
            return SharedExpert(self.reader.mlp(f"{self.prefix}mlp.shared_experts.", self.config.shared_size), None)
        gate = self.reader.matrix(f"{self.prefix}mlp.shared_expert_gate.weight", 1, self.hidden)
        mlp = self.reader.mlp(f"{self.prefix}mlp.shared_expert.", self.config.shared_size)
        return SharedExpert(mlp, self.reader.product(Linear, gate))


def _named(parts: Mapping[str, int], kind: str) -> dict[str, int]:
    return {f"{part}.{kind}": rows for part, rows in parts.items()}
