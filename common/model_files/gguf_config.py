"""A model's architecture, read from GGUF metadata. No torch.

Keys, and what llama.cpp knows of an architecture without any: ggml's docs/gguf.md, llama.cpp's src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.model_config.experts import ExpertsConfig
from common.model_config.fields import FieldReader
from common.model_config.rope import RopeConfig, RopeReader
from common.model_files.config import HF_FAMILIES, ModelConfig, checked

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
}
"""Hugging Face's names of GGUF's architectures. A llama with experts is a mixtral."""
WINDOWS = {"gemma2": (4096, 2), "gemma3_text": (None, 6), "gpt_oss": (None, 2)}
"""By model type: the default of the window, and which layer of each few sees everything: the last of so many."""
SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3_text", 62)}
"""The 27B models, by their layers, scale attention by hidden_size / num_heads in place of a head's size."""
SOFTCAPS = {"gemma2": (50.0, 30.0)}
SCALINGS = ("none", "linear", "yarn")


def from_gguf(
    metadata: Mapping[str, Any], vocab_size: int, tied: bool, path: Path, factors: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Reads GGUF metadata. ModelError when they are damaged, or describe an unsupported model.

    The tensors tell the rest: `vocab_size`, rows of the token embedding, `tied`, without an output matrix, and the
    `factors` of LongRoPE, "short" and "long", where there are any.
    """
    return GGUFReader(metadata, path).read(vocab_size, tied, factors or {})


class GGUFReader(FieldReader):
    """GGUF metadata, keys prefixed by the architecture's name."""

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        architecture = fields.get("general.architecture")
        super().__init__(fields, path, f"{architecture}.")
        if architecture not in MODEL_TYPES:
            raise self.refuse(f"GGUF architecture {architecture!r}", ", ".join(MODEL_TYPES))
        has_experts = bool(self.number("expert_count", 0))
        self.model_type = "mixtral" if architecture == "llama" and has_experts else MODEL_TYPES[str(architecture)]
        self.gemma = HF_FAMILIES[self.model_type] == "gemma"

    def read(self, vocab_size: int, tied: bool, factors: Mapping[str, Any]) -> ModelConfig:
        model_type, gemma, gpt_oss = self.model_type, self.gemma, self.model_type == "gpt_oss"
        layers, heads, hidden = (
            self.count(name) for name in ("block_count", "attention.head_count", "embedding_length")
        )
        head_dim = self.count("attention.key_length", hidden // heads)
        if self.count("attention.value_length", head_dim) != head_dim:
            raise self.refuse("attention.value_length unlike key_length", "equal key and value sizes")
        windows = self._windows(layers)
        experts = self._experts(layers)
        attention_softcap, final_softcap = SOFTCAPS.get(model_type, (0.0, 0.0))
        config = ModelConfig(
            family=HF_FAMILIES[model_type],
            model_type=model_type,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            hidden_size=hidden,
            intermediate_size=self.count("feed_forward_length", experts.intermediate_size if experts else None),
            vocab_size=vocab_size,
            max_model_len=self.count("context_length"),
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            layer_windows=windows,
            layer_ropes=self._ropes(windows, head_dim, factors),
            attention_scale=(hidden // heads if (model_type, layers) in SCALED_BY_WIDTH else head_dim) ** -0.5,
            activation="clamped_swiglu" if gpt_oss else "gelu_tanh" if gemma else "silu",
            tie_embeddings=tied,
            qkv_bias=model_type in ("qwen2", "qwen2_moe", "gpt_oss"),
            output_bias=gpt_oss,
            qk_norm=model_type in ("gemma3_text", "qwen3", "qwen3_moe"),
            sandwich_norm=gemma,
            sinks=gpt_oss,
            fused=model_type == "phi3",
            experts=experts,
            embedding_scale=hidden**0.5 if gemma else 1.0,
            attention_softcap=self.number("attn_logit_softcapping", attention_softcap),
            final_softcap=self.number("final_logit_softcapping", final_softcap),
        )
        return checked(config, self.path)

    def _experts(self, layers: int) -> ExpertsConfig | None:
        count = int(self.number("expert_count", 0))
        if not count:
            return None
        per_token = self.count("expert_used_count")
        shared = 0
        if self.model_type == "qwen2_moe":  # files of 2024 do not tell the shared expert's width
            shared = self.count("expert_shared_feed_forward_length", self.count("feed_forward_length"))
        if per_token > count:
            raise self.refuse(f"expert_used_count {per_token} of {count} experts", "as many experts as a token takes")
        return ExpertsConfig(
            count,
            per_token,
            self.count("feed_forward_length" if self.model_type == "mixtral" else "expert_feed_forward_length"),
            (True,) * layers,
            normalised=self.model_type != "qwen2_moe",
            shared_size=shared,
            biased=self.model_type == "gpt_oss",
        )

    def _windows(self, layers: int) -> tuple[int, ...]:
        if self.model_type == "phi3":  # of all layers, or 0
            return (int(self.number("attention.sliding_window", 0)),) * layers
        if self.model_type not in WINDOWS:
            return (0,) * layers
        default, pattern = WINDOWS[self.model_type]
        window = self.count("attention.sliding_window", default)
        given = self.fields.get(self.prefix + "attention.sliding_window_pattern")
        if not isinstance(given, list):  # of a newer converter, one for each layer
            pattern = self.count("attention.sliding_window_pattern", pattern)
            given = [(i + 1) % pattern != 0 for i in range(layers)]
        if len(given) != layers:
            raise self.refuse(f"attention.sliding_window_pattern of {len(given)} layers", f"one of {layers}")
        return tuple(window if slides else 0 for slides in given)

    def _ropes(self, windows: tuple[int, ...], head_dim: int, factors: Mapping[str, Any]) -> tuple[RopeConfig, ...]:
        kind = "longrope" if factors else self.fields.get(self.prefix + "rope.scaling.type", "none")
        if not factors and kind not in SCALINGS:
            raise self.refuse(f"rope scaling {kind!r}", f"rope scaling {', '.join(SCALINGS)}")
        fields: dict[str, Any] = {"partial_rotary_factor": self.count("rope.dimension_count", head_dim) / head_dim}
        if kind != "none":
            fields |= {"rope_type": kind}
        if kind in ("linear", "yarn"):
            fields |= {"factor": self.number("rope.scaling.factor")}
        if kind in ("longrope", "yarn"):
            original = self.count("rope.scaling.original_context_length")
            fields |= {"original_max_position_embeddings": original, "truncate": self.model_type != "gpt_oss"}
        if kind == "longrope":
            fields |= {f"{length}_factor": list(each) for length, each in factors.items()}
            fields |= {"attention_factor": self.fields.get(self.prefix + "rope.scaling.attn_factor")}
        reader = RopeReader({}, self.path, head_dim, self.count("context_length"))
        full = reader.read(fields, self.number("rope.freq_base", 10000.0))
        if self.model_type != "gemma3_text":
            return (full,) * len(windows)
        local = RopeConfig(self.number("rope.freq_base_swa", 10000.0), rotary_dim=full.rotary_dim)
        return tuple(local if window else full for window in windows)
