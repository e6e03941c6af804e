"""A decoder's weights, assembled for the forward pass: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.model.experts_reader import ExpertsReader
from common.model.latent_reader import LatentReader, LatentWeights
from common.model.mlp import FeedForward
from common.model.rope import rotation_order
from common.model.tensor_reader import TensorReader
from common.model_files.quantization import Quantization
from kernels import Embedding, Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norm weights are float32; weights that a family lacks are None.

    qkv: hidden to (num_heads + 2 * num_kv_heads) * head_dim; with `latent` to the queries alone.
    """

    input_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    mlp: FeedForward
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
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
            head = Linear(table)
            return Embedding.tied(table, head), head
        name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        weight = self.weight({name: config.vocab_size}, config.hidden_size, self.quantization.head)
        return Embedding(table), Linear(weight, dtype=self.dtype)

    def layer(self, index: int) -> LayerWeights:
        config, hidden = self.config, self.config.hidden_size
        prefix, q = f"model.layers.{index}.", config.num_heads * config.value_dim
        sandwich = config.sandwich_norm
        mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        order = None if config.latent else rotation_order(config.layer_ropes[index], config.head_dim)
        latents = None if config.latent is None else LatentReader(self, config.latent, f"{prefix}self_attn.")
        return LayerWeights(
            input_norm=self.norm(f"{prefix}input_layernorm.weight", hidden),
            qkv=self.attention_inputs(prefix, order) if latents is None else latents.queries(),
            output=self.linear(Linear, prefix, {"self_attn.o_proj": hidden}, q, config.output_bias),
            mlp_norm=self.norm(f"{prefix}{mlp_norm}.weight", hidden),
            mlp=self.feed_forward(index),
            q_norm=self.head_norm(f"{prefix}self_attn.q_norm.weight", order),
            k_norm=self.head_norm(f"{prefix}self_attn.k_norm.weight", order),
            post_attention_norm=self.norm(f"{prefix}post_attention_layernorm.weight", hidden) if sandwich else None,
            post_mlp_norm=self.norm(f"{prefix}post_feedforward_layernorm.weight", hidden) if sandwich else None,
            sinks=self.sinks(f"{prefix}self_attn.sinks"),
            latent=None if latents is None else latents.read(),
        )

    def attention_inputs(self, prefix: str, order: Tensor | None) -> Linear:
        """q, k and v; `order`: of the elements of each query and key head, see `rotation_order`."""
        config, dim = self.config, self.config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        if config.fused:
            parts = {"self_attn.qkv_proj": q + 2 * kv}
        rows = None
        if order is not None:
            heads = torch.arange(config.num_heads + config.num_kv_heads)[:, None] * dim
            rows = torch.cat(((heads + order).flatten(), torch.arange(q + kv, q + 2 * kv)))
        return self.linear(Linear, prefix, parts, config.hidden_size, config.qkv_bias, rows)

    def feed_forward(self, index: int) -> FeedForward:
        config, prefix = self.config, f"model.layers.{index}."
        if config.experts is not None and config.experts.layers[index]:
            return ExpertsReader(self, config.experts, prefix).read()
        return self.mlp(f"{prefix}mlp.", config.intermediate_size)

    def sinks(self, name: str) -> Tensor | None:
        config = self.config
        return self.checked(name, (config.num_heads,)).float().to(self.device).contiguous() if config.sinks else None

    def head_norm(self, name: str, order: Tensor | None) -> Tensor | None:
        if not self.config.qk_norm:
            return None
        weight = self.norm(name, self.config.head_dim)
        return weight if order is None else weight[order.to(weight.device)]
