"""A decoder's weights, assembled for the forward pass: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.experts_reader import ExpertsReader
from common.engine.models.latent_reader import LatentReader, LatentWeights
from common.engine.models.mlp import FeedForward
from common.engine.models.rope import rotation_order
from common.engine.models.tensor_reader import TensorReader
from common.model_files import Quantization
from common.model_files.families import NormPlace
from kernels import Embedding, Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norm weights are float32; weights that a family lacks are None.

    norms: of hidden states, in the places where the family has them.
    qkv: hidden to (num_heads + 2 * num_kv_heads) * head_dim; with `latent` to the queries alone.
    q_norm, k_norm: of each head, or with `wide_qk_norm` of all heads.
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
    """embedding [vocab, hidden]; lm_head multiplies by the same when they are tied. rope_factors: see `rope`.

    Without an lm_head the model ends with its hidden states. quantization: of the matrices.
    """

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear | None
    rope_factors: Tensor | None = None
    quantization: Quantization = Quantization.NONE


class Assembler(TensorReader):
    """Reads a source into `ModelWeights`, checking every shape, and quantises the matrices if asked to."""

    def assemble(self, *, with_head: bool = True) -> ModelWeights:
        """Without `with_head` it leaves out what makes logits of hidden states."""
        config = self.config
        embedding, head = self.embedding(with_head)
        norm = self.norm("model.norm.weight", config.hidden_size)
        if with_head:
            norm = norm / config.logits_divisor  # dividing what the head reads divides the logits
        layers = tuple(self.layer(i) for i in range(config.num_layers))
        factors = self.source.read("rope_factors").float() if self.source.has("rope_factors") else None
        return ModelWeights(embedding, layers, norm, head, factors, self.quantization)

    def embedding(self, with_head: bool) -> tuple[Embedding, Linear | None]:
        """The first matrix, and the last one: in a tied model the same."""
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
        """Layer `index` of the configuration; `number`: which one it is in the file, if that is another.

        `columns`: of the matrices of keys, values and queries, if they read more than hidden states. `norms`: names by
        place, if they are not those of the family.
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
        """q, k and v of `columns` numbers; `order`: of the elements of query and key heads, see `rotation_order`."""
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
        """The norm of each head, or of `heads` heads as one."""
        config, count = self.config, heads if self.config.wide_qk_norm else 1
        if not config.qk_norm and not config.wide_qk_norm:
            return None
        weight = self.norm(name, count * config.head_dim)
        if order is None:
            return weight
        return weight.view(count, config.head_dim)[:, order.to(weight.device)].flatten()
