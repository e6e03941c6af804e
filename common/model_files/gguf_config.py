"""A model's architecture, read from GGUF metadata. No torch.

Keys, and what llama.cpp knows of an architecture without any: ggml's docs/gguf.md, llama.cpp's src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.model_files.architecture.experts import SIGMOID_GATING, read_gguf_experts
from common.model_files.architecture.families import HF_FAMILIES, INTERLEAVED, WIDE_NORMS
from common.model_files.architecture.fields import FieldReader
from common.model_files.architecture.latent import LatentConfig, latent_scale, read_gguf_latent
from common.model_files.architecture.rope import RopeConfig, RopeReader
from common.model_files.config import ModelConfig, checked

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
    "granite": "granite",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "glm4": "glm4",
    "olmo2": "olmo2",
    "exaone4": "exaone4",
    "mistral3": "ministral3",
    "glm4moe": "glm4_moe",
    "minimax-m2": "minimax_m2",
    "dots1": "dots1",
    "ernie4_5-moe": "ernie4_5_moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "deepseek2": "deepseek_v2",
}
"""Hugging Face's names of GGUF's architectures.

A llama with experts is a mixtral, an olmo2 with a window an olmo3, a deepseek2 whose experts have sigmoids a V3.
"""
WINDOWS = {"gemma2": (4096, 2), "gemma3_text": (None, 6), "gpt_oss": (None, 2), "olmo3": (None, 4), "exaone4": (0, 4)}
"""By model type: the default of the window, and which layer of each few sees everything: the last of so many."""
UNROTATED_EVERY = {"smollm3": 4}
"""By model type: the last layer of so many rotates nothing."""
SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3_text", 62)}
"""The 27B models, by their layers, scale attention by hidden_size / num_heads in place of a head's size."""
SOFTCAPS = {"gemma2": (50.0, 30.0)}
SCALINGS = ("none", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What metadata leave out and the tensors of a file tell.

    `vocab_size`: rows of the token embedding. `tied`: there is no output matrix. `qkv_bias` and `head_norms`: whether
    the first layer has them. `factors`: of LongRoPE, "short" and "long", where there are any.
    """

    vocab_size: int
    tied: bool = True
    qkv_bias: bool = False
    head_norms: bool = False
    factors: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Collection[str], vocab_size: int, factors: Mapping[str, Any]) -> TensorFacts:
        """`names` of the file's tensors."""
        return cls(
            vocab_size,
            "output.weight" not in names,
            "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
            "blk.0.attn_q_norm.weight" in names,
            factors,
        )


def from_gguf(metadata: Mapping[str, Any], facts: TensorFacts, path: Path) -> ModelConfig:
    """Reads GGUF metadata. ModelError when they are damaged, or describe an unsupported model."""
    return GGUFReader(metadata, facts, path).read()


class GGUFReader(FieldReader):
    """GGUF metadata, keys prefixed by the architecture's name."""

    def __init__(self, fields: Mapping[str, Any], facts: TensorFacts, path: Path) -> None:
        architecture = str(fields.get("general.architecture"))
        super().__init__(fields, path, f"{architecture}.")
        if architecture not in MODEL_TYPES:
            raise self.refuse(f"GGUF architecture {architecture!r}", ", ".join(MODEL_TYPES))
        self.facts = facts
        self.model_type = self._model_type(architecture)
        self.gemma = HF_FAMILIES[self.model_type] == "gemma"

    def _model_type(self, architecture: str) -> str:
        if architecture == "llama" and self.number("expert_count", 0):
            return "mixtral"
        if architecture == "olmo2" and self.number("attention.sliding_window", 0):
            return "olmo3"
        if architecture == "deepseek2" and self.number("expert_gating_func", 0) == SIGMOID_GATING:
            return "deepseek_v3"
        return MODEL_TYPES[architecture]

    def read(self) -> ModelConfig:
        model_type, gemma, gpt_oss = self.model_type, self.gemma, self.model_type == "gpt_oss"
        heads, hidden = (self.count(name) for name in ("attention.head_count", "embedding_length"))
        extra = self.whole("nextn_predict_layers", 0)
        layers = self.layers("block_count") - extra
        if layers < 1:
            raise self.wrong("nextn_predict_layers", extra, f"fewer than the {layers + extra} of block_count")
        latent = read_gguf_latent(self) if HF_FAMILIES[model_type] == "deepseek" else None
        head_dim = self._head_dim(hidden // heads) if latent is None else latent.key_dim
        windows = self._windows(layers)
        experts = read_gguf_experts(self, model_type, layers)
        attention_softcap, final_softcap = SOFTCAPS.get(model_type, (0.0, 0.0))
        residual = self.positive("residual_scale", 1.0)  # see `HFReader`
        rope_dim = head_dim if latent is None else latent.rope_dim
        config = ModelConfig(
            family=HF_FAMILIES[model_type],
            model_type=model_type,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.count("attention.head_count_kv", heads) if latent is None else 1,
            head_dim=head_dim,
            hidden_size=hidden,
            intermediate_size=self.count("feed_forward_length", experts.intermediate_size if experts else None),
            vocab_size=self.facts.vocab_size,
            max_model_len=self.count("context_length"),
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon") / residual**2,
            layer_windows=windows,
            layer_ropes=self._ropes(windows, rope_dim),
            attention_scale=self._attention_scale(layers, hidden // heads, head_dim, latent),
            activation="clamped_swiglu" if gpt_oss else "gelu_tanh" if gemma else "silu",
            tie_embeddings=self.facts.tied,
            qkv_bias=self.facts.qkv_bias,
            output_bias=gpt_oss,
            qk_norm=self.facts.head_norms and model_type not in WIDE_NORMS,
            wide_qk_norm=model_type in WIDE_NORMS,
            sinks=gpt_oss,
            fused_qkv=model_type == "phi3",
            fused_gate_up=model_type in ("phi3", "glm4"),
            experts=experts,
            embedding_scale=hidden**0.5 if gemma else self.number("embedding_scale", 1.0) / residual,
            attention_softcap=self.number("attn_logit_softcapping", attention_softcap),
            final_softcap=self.number("final_logit_softcapping", final_softcap),
            logits_divisor=self.positive("logit_scale", 1.0),
            latent=latent,
            extra_layers=extra,
        )
        return checked(config, self.path)

    def _head_dim(self, width: int) -> int:
        head_dim = self.count("attention.key_length", width)
        if self.count("attention.value_length", head_dim) != head_dim:
            raise self.refuse("attention.value_length unlike key_length", "equal key and value sizes")
        return head_dim

    def _attention_scale(self, layers: int, width: int, head_dim: int, latent: LatentConfig | None) -> float:
        """What multiplies scores; `width`: hidden_size / num_heads."""
        if latent is not None:
            return latent_scale(latent, self._rope_fields(latent.rope_dim), self.path)
        scale: float = (width if (self.model_type, layers) in SCALED_BY_WIDTH else head_dim) ** -0.5
        return self.number("attention.scale", scale)

    def _windows(self, layers: int) -> tuple[int, ...]:
        if self.model_type == "phi3":  # of all layers, or 0
            return (int(self.number("attention.sliding_window", 0)),) * layers
        if self.model_type not in WINDOWS:
            return (0,) * layers
        default, pattern = WINDOWS[self.model_type]
        window = int(self.number("attention.sliding_window", default))
        if not window:
            return (0,) * layers
        given = self.fields.get(self.prefix + "attention.sliding_window_pattern")
        if not isinstance(given, list):  # of a newer converter, one for each layer
            pattern = self.count("attention.sliding_window_pattern", pattern)
            given = [(i + 1) % pattern != 0 for i in range(layers)]
        if len(given) != layers:
            raise self.refuse(f"attention.sliding_window_pattern of {len(given)} layers", f"one of {layers}")
        return tuple(window if slides else 0 for slides in given)

    def _ropes(self, windows: tuple[int, ...], rope_dim: int) -> tuple[RopeConfig, ...]:
        """Of each layer, for heads of which rotary embedding sees `rope_dim` numbers."""
        reader = RopeReader({}, self.path, rope_dim, self.count("context_length"))
        full = reader.read(self._rope_fields(rope_dim), self.number("rope.freq_base", 10000.0))
        full = replace(full, interleaved=self.model_type in INTERLEAVED)
        return tuple(self._rope(layer, window, full) for layer, window in enumerate(windows))

    def _rope_fields(self, rope_dim: int) -> dict[str, Any]:
        """By the names of config.json."""
        factors = self.facts.factors
        kind = "longrope" if factors else self.fields.get(self.prefix + "rope.scaling.type", "none")
        if not factors and kind not in SCALINGS:
            raise self.refuse(f"rope scaling {kind!r}", f"rope scaling {', '.join(SCALINGS)}")
        fields: dict[str, Any] = {"partial_rotary_factor": self.count("rope.dimension_count", rope_dim) / rope_dim}
        if kind == "none":
            return fields
        fields |= {"rope_type": kind}
        if kind in ("linear", "yarn"):
            fields |= {"factor": self.number("rope.scaling.factor")}
        if kind in ("longrope", "yarn"):
            original = self.count("rope.scaling.original_context_length")
            fields |= {"original_max_position_embeddings": original, "truncate": self.model_type != "gpt_oss"}
        if kind == "longrope":
            fields |= {f"{length}_factor": list(each) for length, each in factors.items()}
            fields |= {"attention_factor": self.fields.get(self.prefix + "rope.scaling.attn_factor")}
        if kind == "yarn" and (log_multiplier := self.number("rope.scaling.yarn_log_multiplier", 0.0)):
            # llama.cpp's converter writes a tenth of it for DeepSeek, all of it for Ministral.
            mscale = log_multiplier * (10.0 if HF_FAMILIES[self.model_type] == "deepseek" else 1.0)
            fields |= {"mscale": mscale, "mscale_all_dim": mscale}
        fields |= {"llama_4_scaling_beta": self.number("attention.temperature_scale", 0.0)}
        return fields

    def _rope(self, layer: int, window: int, full: RopeConfig) -> RopeConfig:
        """Of one layer with such a window, where `full` is that of layers that see everything."""
        every = UNROTATED_EVERY.get(self.model_type)
        if every is not None and (layer + 1) % every == 0:
            return RopeConfig(full.theta, "off")
        if self.model_type == "exaone4" and self.fields.get(self.prefix + "attention.sliding_window") and not window:
            return RopeConfig(full.theta, "off")
        if window and self.model_type == "gemma3_text":
            return RopeConfig(self.number("rope.freq_base_swa", 10000.0), rotary_dim=full.rotary_dim)
        if window and self.model_type == "olmo3":
            return RopeConfig(full.theta)
        return full
