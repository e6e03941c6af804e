"""A decoder's weights, assembled for the forward pass: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from common.errors import ModelError
from common.model.experts_reader import ExpertsReader
from common.model.latent_reader import LatentReader, LatentWeights
from common.model.mlp import MLP, FeedForward
from common.model.rope import rotation_order
from common.model_files.config import ModelConfig
from common.model_files.quantization import Quantization
from kernels import Embedding, GatedLinear, Linear, QuantisedWeight, Weight, quantise, unified

L = TypeVar("L", bound=Linear)


class WeightSource(Protocol):
    """A file or folder of tensors, by Hugging Face's names."""

    def read(self, name: str) -> Tensor:
        """The tensor, of any float dtype. ModelError when it is missing."""

    def has(self, name: str) -> bool: ...

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        """The tensor in the integers that the file stores; None where kernels multiply no such ones."""

    def is_quantised(self, name: str) -> bool:
        """Whether the file holds the tensor in fewer bits than 16."""

    @property
    def has_quantised(self) -> bool:
        """Whether the file holds any such tensor."""

    @property
    def label(self) -> str:
        """The source's name in errors."""

    @property
    def norm_offset(self) -> float:
        """Added to Gemma's norm weights: 1.0 where the file stores them as offsets from one."""


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


class Assembler:
    """Reads a source into `ModelWeights`, checking every shape, and quantises the matrices if asked to.

    Without `with_head` it leaves out what makes logits of hidden states.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = Quantization.NONE,
        *,
        with_head: bool = True,
    ) -> None:
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.quantization, self.with_head = quantization, with_head
        self.treated: Counter[str] = Counter()
        """How many of the file's matrices are kept, in how many bits, or in floats."""

    def assemble(self) -> ModelWeights:
        config = self.config
        embedding, head = self.embedding()
        norm = self.norm("model.norm.weight", config.hidden_size)
        layers = tuple(self.layer(i) for i in range(config.num_layers))
        factors = self.source.read("rope_factors").float() if self.source.has("rope_factors") else None
        return ModelWeights(embedding, layers, norm, head, factors, self.quantization)

    def embedding(self) -> tuple[Embedding, Linear | None]:
        """The first matrix, and the last one: in a tied model the same."""
        config = self.config
        table = self.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if not self.with_head:
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

    def mlp(self, prefix: str, inner: int) -> MLP:
        """The gated MLP whose tensors' names begin so."""
        config, hidden = self.config, self.config.hidden_size
        gates = {"gate_up_proj": 2 * inner} if config.fused else {"gate_proj": inner, "up_proj": inner}
        return MLP(
            self.linear(GatedLinear, prefix, gates, hidden, config.mlp_bias),
            self.linear(Linear, prefix, {"down_proj": hidden}, inner, config.mlp_bias),
        )

    def linear(
        self,
        kind: type[L],
        prefix: str,
        parts: Mapping[str, int],
        columns: int,
        biased: bool,
        order: Tensor | None = None,
    ) -> L:
        """One matrix product with `parts` stacked by rows, which `order`, int64 [rows], then reorders."""
        names = {f"{prefix}{part}.weight": rows for part, rows in parts.items()}
        weight = self.weight(names, columns, self.quantization)
        bias = self.bias({f"{prefix}{part}.bias": rows for part, rows in parts.items()}) if biased else None
        if order is not None:
            order = order.to(weight.numbers.device if isinstance(weight, QuantisedWeight) else weight.device)
            weight = weight.rows(order) if isinstance(weight, QuantisedWeight) else weight[order]
            bias = None if bias is None else bias[order]
        return kind(weight, bias, dtype=self.dtype)

    def weight(self, parts: Mapping[str, int], columns: int, quantization: Quantization) -> Weight:
        """Matrices stacked by rows: as the file holds them, dense, or quantised."""
        held = [self._held(name, rows, columns) for name, rows in parts.items()] if quantization.keeps_held else []
        if held and all(part is not None and quantization.takes(part.bits) for part in held):
            whole = [part for part in held if part is not None]
            if (together := unified(whole)) is not None:
                self.treated[f"kept in {together.bits} bits"] += len(parts)
                return together
        dense = torch.empty(sum(parts.values()), columns, dtype=self._dense_dtype(quantization), device=self.device)
        self._stack(dense, parts)
        bits = quantization.bits(all(self.source.is_quantised(name) for name in parts))
        rounded = quantise(dense, bits) if bits else None
        how = f"rounded to {bits} bits" if rounded else f"held in {str(self.dtype).removeprefix('torch.')}"
        self.treated[how] += len(parts)
        return rounded or dense.to(self.dtype)

    def as_asked(self, dense: Tensor, in_file: bool) -> Weight:
        """A matrix that is part of a tensor, dense or quantised; `in_file`: whether that holds fewer bits than 16."""
        dense, bits = dense.to(self.device).contiguous(), self.quantization.bits(in_file)
        return (quantise(dense, bits) if bits else None) or dense.to(self.dtype)

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self.checked(name, shape).to(device=self.device, dtype=self.dtype).contiguous()

    def bias(self, parts: Mapping[str, int]) -> Tensor:
        return self._stack(torch.empty(sum(parts.values()), dtype=self.dtype, device=self.device), parts)

    def norm(self, name: str, size: int) -> Tensor:
        weight = self.checked(name, (size,)).float()
        return (weight + (self.source.norm_offset if self.config.family == "gemma" else 0.0)).to(self.device)

    def sinks(self, name: str) -> Tensor | None:
        config = self.config
        return self.checked(name, (config.num_heads,)).float().to(self.device).contiguous() if config.sinks else None

    def head_norm(self, name: str, order: Tensor | None) -> Tensor | None:
        if not self.config.qk_norm:
            return None
        weight = self.norm(name, self.config.head_dim)
        return weight if order is None else weight[order.to(weight.device)]

    def _dense_dtype(self, quantization: Quantization) -> torch.dtype:
        """The type that matrices are quantised from: wide enough for the file's own values."""
        return self.dtype if quantization is Quantization.NONE else torch.float32

    def _held(self, name: str, rows: int, columns: int) -> QuantisedWeight | None:
        held = self.source.read_quantised(name)
        return held if held is not None and held.shape == (rows, columns) else None

    def _stack(self, out: Tensor, parts: Mapping[str, int]) -> Tensor:
        """Copies the tensors into `out`, one below the other."""
        at = 0
        for name, count in parts.items():
            out[at : at + count] = self.checked(name, (count, *out.shape[1:]))
            at += count
        return out

    def checked(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor, which must be of floats and have that shape."""
        tensor = self.source.read(name)
        if tuple(tensor.shape) != tuple(shape):
            raise ModelError(
                f"{self.source.label}: tensor {name} is {list(tensor.shape)}, the configuration wants {list(shape)}: "
                "configuration and weights are not of one model, fetch both again"
            )
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ModelError(
                f"{self.source.label}: tensor {name} has dtype {tensor.dtype}, which is not supported: "
                "use float32, float16 or bfloat16 weights, or a GGUF file"
            )
        return tensor
