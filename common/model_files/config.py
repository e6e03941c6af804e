"""A model's architecture, read from GGUF metadata or from Hugging Face's config.json. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError

HF_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
GGUF_FAMILIES = {"llama": "llama", "qwen2": "llama", "qwen3": "llama", "gemma3": "gemma3"}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of some layers. `scaling` is "none", "linear" (`factor`) or "llama3" (all fields)."""

    theta: float
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Numbers of one decoder-only model.

    `layer_windows[i]` is the number of tokens layer i may look back to, itself included (0: all of them);
    `layer_ropes[i]` its rotary embedding. `attention_scale` multiplies q.k; softcaps of 0 are off.
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
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0


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


def from_gguf(metadata: Mapping[str, Any], vocab_size: int, tied: bool, path: Path) -> ModelConfig:
    """Reads GGUF metadata. ModelError as `from_hf`.

    The tensors tell the rest: `vocab_size`, rows of the token embedding, and `tied`, without an output matrix.
    """
    return GGUFReader(metadata, path).read(vocab_size, tied)


class _Reader:
    """Typed access to one document; every failure names the file, the field and what was expected."""

    def __init__(self, fields: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.fields, self.path, self.prefix = fields, path, prefix

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(self.prefix + name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {self.prefix}{name} is {value!r}, expected a number: fetch the file again")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or not 0 < value < 2**31:
            raise ModelError(f"{self.path}: {self.prefix}{name} is {value!r}, expected a positive whole number")
        return int(value)

    def refuse(self, what: str, supported: str) -> ModelError:
        return ModelError(f"{self.path}: {what} is not supported: use a model with {supported}")

    def check(self, config: ModelConfig) -> ModelConfig:
        if config.num_heads % config.num_kv_heads:
            raise ModelError(f"{self.path}: {config.num_heads} heads do not divide over {config.num_kv_heads} KV heads")
        if config.head_dim % 2:
            raise ModelError(f"{self.path}: head_dim {config.head_dim} is odd, rotary embedding needs pairs")
        return config


class HFReader(_Reader):
    """Hugging Face's config.json, in the layouts that transformers 4 and 5 write."""

    def read(self) -> ModelConfig:
        model_type = self.fields.get("model_type")
        if model_type == "gemma3" and isinstance(self.fields.get("text_config"), dict):
            return HFReader({"model_type": "gemma3_text", **self.fields["text_config"]}, self.path).read()
        if model_type not in HF_FAMILIES:
            raise self.refuse(f"model_type {model_type!r}", ", ".join(HF_FAMILIES))
        if self.fields.get("use_bidirectional_attention"):
            raise self.refuse("use_bidirectional_attention", "causal attention")
        gemma = model_type == "gemma3_text"
        layers, heads, hidden = (
            self.count(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        head_dim = self.count("head_dim", 256 if gemma else hidden // heads)
        bias = bool(self.fields.get("attention_bias", False)) and model_type != "qwen2"
        config = ModelConfig(
            family=HF_FAMILIES[model_type],
            model_type=model_type,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.count("num_key_value_heads", heads),
            head_dim=head_dim,
            hidden_size=hidden,
            intermediate_size=self.count("intermediate_size"),
            vocab_size=self.count("vocab_size"),
            max_model_len=self.count("max_position_embeddings", 131072 if gemma else 2048),
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            layer_windows=self._windows(layers, model_type),
            layer_ropes=self._ropes(layers, model_type),
            attention_scale=self.number("query_pre_attn_scalar", 256) ** -0.5 if gemma else head_dim**-0.5,
            activation=self._activation("hidden_activation" if gemma else "hidden_act", gemma),
            tie_embeddings=bool(self.fields.get("tie_word_embeddings", gemma)),
            qkv_bias=bias or model_type == "qwen2",
            output_bias=bias,
            mlp_bias=bool(self.fields.get("mlp_bias", False)),
            qk_norm=gemma or model_type == "qwen3",
            sandwich_norm=gemma,
            embedding_scale=hidden**0.5 if gemma else 1.0,
            attention_softcap=self.number("attn_logit_softcapping", 0.0),
            final_softcap=self.number("final_logit_softcapping", 0.0),
        )
        return self.check(config)

    def _activation(self, name: str, gemma: bool) -> str:
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
        if model_type == "gemma3_text":
            pattern = self.count("sliding_window_pattern", 6)
            return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
        if model_type.startswith("qwen"):
            first = int(self.number("max_window_layers", 28))
            return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        return ["sliding_attention"] * layers

    def _windows(self, layers: int, model_type: str) -> tuple[int, ...]:
        default = 4096 if model_type in ("gemma3_text", "mistral") else 0
        value = self.fields.get("sliding_window", default)
        off = model_type == "llama" or (model_type.startswith("qwen") and not self.fields.get("use_sliding_window"))
        if not value or off:
            return (0,) * layers
        window = self.count("sliding_window", default)
        kinds = self._layer_types(layers, model_type)
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def _ropes(self, layers: int, model_type: str) -> tuple[RopeConfig, ...]:
        parameters = self.fields.get("rope_parameters") or {}
        if model_type != "gemma3_text":
            scaling = parameters or self.fields.get("rope_scaling") or {}
            return (self._rope(scaling, self.number("rope_theta", 10000.0)),) * layers
        if "full_attention" in parameters or "sliding_attention" in parameters:
            far, near = parameters.get("full_attention") or {}, parameters.get("sliding_attention") or {}
        else:
            far, near = parameters or self.fields.get("rope_scaling") or {}, {}
        full = self._rope(far, self.number("rope_theta", 1000000.0))
        local = self._rope(near, self.number("rope_local_base_freq", 10000.0))
        kinds = self._layer_types(layers, model_type)
        return tuple(local if kind == "sliding_attention" else full for kind in kinds)

    def _rope(self, fields: Mapping[str, Any], theta: float) -> RopeConfig:
        kind = fields.get("rope_type", fields.get("type", "default"))
        reader = _Reader(fields, self.path)
        theta = reader.number("rope_theta", theta)
        if reader.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0)) != 1.0:
            raise self.refuse("partial_rotary_factor", "rotary embedding of whole heads")
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, "linear", reader.number("factor"))
        if kind != "llama3":
            raise self.refuse(f"rope scaling {kind!r}", "rope scaling llama3, linear or none")
        return RopeConfig(
            theta,
            "llama3",
            reader.number("factor"),
            reader.number("low_freq_factor"),
            reader.number("high_freq_factor"),
            reader.count("original_max_position_embeddings"),
        )


class GGUFReader(_Reader):
    """GGUF metadata, keys prefixed by the architecture's name."""

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        architecture = fields.get("general.architecture")
        super().__init__(fields, path, f"{architecture}.")
        if architecture not in GGUF_FAMILIES:
            raise self.refuse(f"GGUF architecture {architecture!r}", ", ".join(GGUF_FAMILIES))
        self.architecture = str(architecture)

    def read(self, vocab_size: int, tied: bool) -> ModelConfig:
        gemma = self.architecture == "gemma3"
        layers, heads, hidden = (
            self.count(name) for name in ("block_count", "attention.head_count", "embedding_length")
        )
        head_dim = self.count("attention.key_length", hidden // heads)
        if self.count("attention.value_length", head_dim) != head_dim:
            raise self.refuse("attention.value_length unlike key_length", "equal key and value sizes")
        if self.count("rope.dimension_count", head_dim) != head_dim:
            raise self.refuse("rope.dimension_count unlike the head size", "rotary embedding of whole heads")
        # as llama.cpp: Gemma 3 27B (62 layers) alone scales by hidden_size / num_heads
        scaled_dim = hidden // heads if gemma and layers == 62 else head_dim
        windows = self._windows(layers) if gemma else (0,) * layers
        config = ModelConfig(
            family=GGUF_FAMILIES[self.architecture],
            model_type="gemma3_text" if gemma else self.architecture,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            hidden_size=hidden,
            intermediate_size=self.count("feed_forward_length"),
            vocab_size=vocab_size,
            max_model_len=self.count("context_length"),
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            layer_windows=windows,
            layer_ropes=self._ropes(windows),
            attention_scale=scaled_dim**-0.5,
            activation="gelu_tanh" if gemma else "silu",
            tie_embeddings=tied,
            qkv_bias=self.architecture == "qwen2",
            qk_norm=self.architecture in ("gemma3", "qwen3"),
            sandwich_norm=gemma,
            embedding_scale=hidden**0.5 if gemma else 1.0,
            attention_softcap=self.number("attn_logit_softcapping", 0.0),
            final_softcap=self.number("final_logit_softcapping", 0.0),
        )
        return self.check(config)

    def _windows(self, layers: int) -> tuple[int, ...]:
        window = self.count("attention.sliding_window")
        pattern = self.count("attention.sliding_window_pattern", 6)
        return tuple(0 if (i + 1) % pattern == 0 else window for i in range(layers))

    def _ropes(self, windows: tuple[int, ...]) -> tuple[RopeConfig, ...]:
        theta = self.number("rope.freq_base", 10000.0)
        kind = self.fields.get(self.prefix + "rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise self.refuse(f"rope scaling {kind!r}", "rope scaling linear or none")
        full = RopeConfig(theta) if kind == "none" else RopeConfig(theta, "linear", self.number("rope.scaling.factor"))
        local = RopeConfig(self.number("rope.freq_base_swa", 10000.0))
        return tuple(local if window else full for window in windows)
