"""A model's architecture, and how Hugging Face's config.json describes it. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model_config.experts import ExpertsConfig, read_experts
from common.model_config.fields import FieldReader
from common.model_config.latent import LatentConfig, latent_scale, read_latent
from common.model_config.rope import RopeConfig, RopeReader

HF_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen2_moe": "llama",
    "qwen3_moe": "llama",
    "phi3": "llama",
    "gpt_oss": "llama",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gemma3": "gemma",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        **{"head_dim": 256, "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True},
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3_text": {
        **{"head_dim": 256, "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        **{"rope_theta": 1e6, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    },
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rope_theta": 1e6, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "qwen2_moe": {"max_position_embeddings": 32768, "qkv_bias": True},
    "qwen3_moe": {"max_position_embeddings": 32768},
    "deepseek_v2": {"n_shared_experts": 2},
    "deepseek_v3": {"max_position_embeddings": 4096, "n_shared_experts": 1},
    "kimi_k2": {"max_position_embeddings": 4096, "n_shared_experts": 1},
    "gpt_oss": {
        **{"head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": 128},
        **{"rope_theta": 150000.0, "attention_bias": True},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
}
"""What a config.json may leave out, as transformers fills it in."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Numbers of one decoder-only model.

    `layer_windows[i]` is the number of tokens layer i may look back to, itself included (0: all of them);
    `layer_ropes[i]` its rotary embedding. `attention_scale` multiplies q.k; softcaps of 0 are off. `sinks`: attention
    has one more logit a head. `fused`: the file holds q, k, v in one matrix, and gate and up too. Some layers have
    `experts` in place of the MLP of `intermediate_size`. With `latent` the cache holds one KV head of `head_dim`
    numbers a token, which are keys and values of all heads.
    """

    family: str
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    layer_windows: tuple[int, ...]
    layer_ropes: tuple[RopeConfig, ...]
    attention_scale: float
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norm: bool = False
    sinks: bool = False
    fused: bool = False
    experts: ExpertsConfig | None = None
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    latent: LatentConfig | None = None
    extra_layers: int = 0
    """Layers of the file behind those that are computed: they predict more tokens at once, and are not read."""

    @property
    def kv_numbers(self) -> int:
        """Numbers that the cache holds of a token: keys and values of all layers, or their latents."""
        return self.num_layers * self.num_kv_heads * self.head_dim * (2 if self.latent is None else 1)

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that rotary embedding sees."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Numbers of what a head's attention yields."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def latent_dim(self) -> int:
        """Numbers of a key that are its value too; 0 where values have a place of their own."""
        return 0 if self.latent is None else self.latent.rank

    @property
    def window(self) -> int:
        """Tokens that the layers look back to at most, itself included; 0: some layer sees all that there can be."""
        widest = max(self.layer_windows) if all(self.layer_windows) else 0
        return widest if widest < self.max_model_len else 0


def from_hf(path: Path) -> ModelConfig:
    """Reads a config.json. ModelError when it is missing, damaged, or describes an unsupported model."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}): give a folder that holds config.json") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): fetch the file again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} does not hold a JSON object: fetch the file again")
    return HFReader(raw, path).read()


def checked(config: ModelConfig, path: Path) -> ModelConfig:
    """The configuration, if its numbers fit together. Raises ModelError."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{path}: {config.num_heads} heads do not divide over {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelError(f"{path}: head_dim {config.head_dim} is odd, rotary embedding needs pairs")
    return config


class HFReader(FieldReader):
    """Hugging Face's config.json, in the layouts that transformers 4 and 5 write."""

    def read(self) -> ModelConfig:
        model_type = self.fields.get("model_type")
        if model_type == "gemma3" and isinstance(self.fields.get("text_config"), dict):
            return HFReader({"model_type": "gemma3_text", **self.fields["text_config"]}, self.path).read()
        if model_type not in HF_FAMILIES:
            raise self.refuse(f"model_type {model_type!r}", ", ".join(HF_FAMILIES))
        if self.fields.get("use_bidirectional_attention"):
            raise self.refuse("use_bidirectional_attention", "causal attention")
        self.fields = DEFAULTS.get(model_type, {}) | dict(self.fields)
        gemma = HF_FAMILIES[model_type] == "gemma"
        layers, heads, hidden = (
            self.count(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        latent = read_latent(model_type, self.fields, self.path)
        head_dim = self.count("head_dim", hidden // heads) if latent is None else latent.key_dim
        rope_dim = head_dim if latent is None else latent.rope_dim
        bias = bool(self.fields.get("attention_bias", False)) and model_type != "qwen2"
        max_len = self.count("max_position_embeddings", 2048)
        config = ModelConfig(
            family=HF_FAMILIES[model_type],
            model_type=model_type,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.count("num_key_value_heads", heads) if latent is None else 1,
            head_dim=head_dim,
            hidden_size=hidden,
            intermediate_size=self.count("intermediate_size"),
            vocab_size=self.count("vocab_size"),
            max_model_len=max_len,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            layer_windows=self._windows(layers, model_type),
            layer_ropes=self._ropes(layers, model_type, RopeReader(self.fields, self.path, rope_dim, max_len)),
            attention_scale=self._attention_scale(gemma, head_dim, latent),
            activation="clamped_swiglu" if model_type == "gpt_oss" else self._activation(gemma),
            tie_embeddings=bool(self.fields.get("tie_word_embeddings", False)),
            qkv_bias=bias or model_type == "qwen2" or bool(self.fields.get("qkv_bias", False)),
            output_bias=bias,
            mlp_bias=bool(self.fields.get("mlp_bias", False)),
            qk_norm=model_type in ("gemma3_text", "qwen3", "qwen3_moe"),
            sandwich_norm=gemma,
            sinks=model_type == "gpt_oss",
            fused=model_type == "phi3",
            experts=read_experts(model_type, self.fields, self.path, layers),
            embedding_scale=hidden**0.5 if gemma else 1.0,
            attention_softcap=self.number("attn_logit_softcapping", 0.0),
            final_softcap=self.number("final_logit_softcapping", 0.0),
            latent=latent,
            extra_layers=0 if latent is None else int(self.number("num_nextn_predict_layers", 0)),
        )
        return checked(config, self.path)

    def _attention_scale(self, gemma: bool, head_dim: int, latent: LatentConfig | None) -> float:
        if latent is not None:
            return latent_scale(latent, self._rope_fields(), self.path)
        scale: float = self.number("query_pre_attn_scalar") ** -0.5 if gemma else head_dim**-0.5
        return scale

    def _rope_fields(self) -> dict[str, Any]:
        """Of a model with one rotary embedding, as transformers 5 and 4 name them."""
        found = self.fields.get("rope_parameters") or self.fields.get("rope_scaling") or {}
        return dict(found)

    def _activation(self, gemma: bool) -> str:
        name = "hidden_activation" if gemma else "hidden_act"
        value = self.fields.get(name) or ("gelu_pytorch_tanh" if gemma else "silu")
        if value not in ACTIVATIONS:
            raise self.refuse(f"{name} {value!r}", ", ".join(ACTIVATIONS))
        return ACTIVATIONS[value]

    def _layer_types(self, layers: int, model_type: str) -> list[str]:
        """The attention of each layer, sliding_attention or full_attention."""
        kinds = self.fields.get("layer_types")
        if isinstance(kinds, list):
            if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
                raise self.refuse(f"layer_types {sorted(set(kinds))} of {layers} layers", "sliding or full attention")
            return kinds
        pattern = {"gemma2": 2, "gpt_oss": 2}.get(model_type, 0)
        if model_type == "gemma3_text":
            pattern = self.count("sliding_window_pattern", 6)
        if pattern:
            return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
        first = int(self.number("max_window_layers", 28))
        if model_type in ("qwen2", "qwen3"):
            return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        if model_type == "qwen2_moe":
            return ["full_attention" if i % 2 or i >= first else "sliding_attention" for i in range(layers)]
        return ["sliding_attention"] * layers

    def _windows(self, layers: int, model_type: str) -> tuple[int, ...]:
        off = model_type == "llama" or HF_FAMILIES[model_type] == "deepseek"
        off = off or (model_type.startswith("qwen") and not self.fields.get("use_sliding_window"))
        if not self.fields.get("sliding_window") or off:
            return (0,) * layers
        window = self.count("sliding_window")
        kinds = self._layer_types(layers, model_type)
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def _ropes(self, layers: int, model_type: str, reader: RopeReader) -> tuple[RopeConfig, ...]:
        parameters = self.fields.get("rope_parameters") or {}
        theta = self.number("rope_theta", 10000.0)
        if model_type != "gemma3_text":
            return (reader.read(self._rope_fields(), theta),) * layers
        if "full_attention" in parameters or "sliding_attention" in parameters:
            far, near = parameters.get("full_attention") or {}, parameters.get("sliding_attention") or {}
        else:
            far, near = parameters or self.fields.get("rope_scaling") or {}, {}
        full = reader.read(far, theta)
        local = reader.read(near, self.number("rope_local_base_freq", 10000.0))
        kinds = self._layer_types(layers, model_type)
        return tuple(local if kind == "sliding_attention" else full for kind in kinds)
