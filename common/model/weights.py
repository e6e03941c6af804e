"""A decoder's weights as the forward pass wants them: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diptych.common.errors import ModelError
from diptych.common.model.config import ModelConfig
from diptych.kernels import Linear


class WeightSource(Protocol):
    """A file or folder of named tensors. Names are Hugging Face's, whatever the file calls them."""

    def read(self, name: str) -> Tensor:
        """The tensor, of any float dtype. ModelError when it is missing."""

    def has(self, name: str) -> bool: ...

    @property
    def label(self) -> str:
        """What to call the source in an error."""

    @property
    def norm_offset(self) -> float:
        """What to add to Gemma's norm weights: 1.0 where the file stores them as offsets from one."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norm weights are float32. What a family does not have is None.

    qkv: hidden to (num_heads + 2 * num_kv_heads) * head_dim; gate_up: hidden to 2 * intermediate, gate first.
    """

    input_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding [vocab, hidden]; lm_head multiplies by the same when they are tied. rope_factors: see `rope`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear
    rope_factors: Tensor | None = None


class Assembler:
    """Reads a source into `ModelWeights`, checking every shape."""

    def __init__(self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.source, self.dtype, self.device = config, source, dtype, device

    def assemble(self) -> ModelWeights:
        config = self.config
        embedding = self.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        head = embedding
        if not config.tie_embeddings:
            head = self.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
        norm = self.norm("model.norm.weight", config.hidden_size)
        layers = tuple(self.layer(f"model.layers.{i}.") for i in range(config.num_layers))
        factors = self.source.read("rope_factors").float() if self.source.has("rope_factors") else None
        return ModelWeights(embedding, layers, norm, Linear(head), factors)

    def layer(self, prefix: str) -> LayerWeights:
        config, hidden = self.config, self.config.hidden_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        projections = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        gates = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        sandwich = config.sandwich_norm
        mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        output = self.matrix(f"{prefix}self_attn.o_proj.weight", hidden, q)
        down = self.matrix(f"{prefix}mlp.down_proj.weight", hidden, inner)
        output_bias = self.bias(prefix, {"self_attn.o_proj": hidden}) if config.output_bias else None
        down_bias = self.bias(prefix, {"mlp.down_proj": hidden}) if config.mlp_bias else None
        return LayerWeights(
            input_norm=self.norm(f"{prefix}input_layernorm.weight", hidden),
            qkv=self.fused(prefix, projections, hidden, config.qkv_bias),
            output=Linear(output, output_bias),
            mlp_norm=self.norm(f"{prefix}{mlp_norm}.weight", hidden),
            gate_up=self.fused(prefix, gates, hidden, config.mlp_bias),
            down=Linear(down, down_bias),
            q_norm=self.norm(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self.norm(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
            post_attention_norm=self.norm(f"{prefix}post_attention_layernorm.weight", hidden) if sandwich else None,
            post_mlp_norm=self.norm(f"{prefix}post_feedforward_layernorm.weight", hidden) if sandwich else None,
        )

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self._checked(name, shape).to(device=self.device, dtype=self.dtype).contiguous()

    def fused(self, prefix: str, parts: Mapping[str, int], columns: int, biased: bool) -> Linear:
        """Matrices stacked by rows, converted one by one into their place."""
        out = torch.empty(sum(parts.values()), columns, dtype=self.dtype, device=self.device)
        self._stack(out, [f"{prefix}{part}.weight" for part in parts], list(parts.values()))
        return Linear(out, self.bias(prefix, parts) if biased else None)

    def bias(self, prefix: str, parts: Mapping[str, int]) -> Tensor:
        out = torch.empty(sum(parts.values()), dtype=self.dtype, device=self.device)
        return self._stack(out, [f"{prefix}{part}.bias" for part in parts], list(parts.values()))

    def norm(self, name: str, size: int) -> Tensor:
        weight = self._checked(name, (size,)).float()
        return (weight + (self.source.norm_offset if self.config.family == "gemma3" else 0.0)).to(self.device)

    def _stack(self, out: Tensor, names: Sequence[str], rows: Sequence[int]) -> Tensor:
        at = 0
        for name, count in zip(names, rows, strict=True):
            out[at : at + count] = self._checked(name, (count, *out.shape[1:]))
            at += count
        return out

    def _checked(self, name: str, shape: Sequence[int]) -> Tensor:
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
