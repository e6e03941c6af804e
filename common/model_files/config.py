"""A model's architecture, and how Hugging Face's config.json describes it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError, shown
from common.model_files.architecture.experts import DEEPSEEK_LIKE, ExpertsConfig, read_experts
from common.model_files.architecture.families import (
    ACTIVATIONS,
    DEFAULTS,
    HEAD_NORMS,
    HF_FAMILIES,
    INTERLEAVED,
    MLP_BIAS,
    NO_BIAS,
    NO_OUTPUT_BIAS,
    NULLS,
    RENAMED,
    TEXT_DEFAULTS,
    WIDE_NORMS,
    WRAPPERS,
)
from common.model_files.architecture.fields import FieldReader
from common.model_files.architecture.latent import LatentConfig, latent_scale, read_latent
from common.model_files.architecture.layers import LayerReader
from common.model_files.architecture.rope import RopeConfig
from common.model_files.json_file import read_json


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Numbers of one decoder-only model.

    `layer_windows[i]` is the number of tokens layer i may look back to, itself included (0: all of them);
    `layer_ropes[i]` its rotary embedding. `attention_scale` multiplies q.k; softcaps of 0 are off; logits are divided
    by `logits_divisor`. `qk_norm`: each head of queries and keys is normalised, `wide_qk_norm`: all of them as one.
    `sinks`: attention has one more logit a head. `fused_qkv`, `fused_gate_up`: the file holds them in one matrix. Some
    layers have `experts` in place of the MLP of `intermediate_size`. With `latent` the cache holds one KV head of
    `head_dim` numbers a token, which are keys and values of all heads.
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
    tie_embeddings: bool | None = False
    """None: if the file has no head of its own."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    sinks: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    experts: ExpertsConfig | None = None
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    logits_divisor: float = 1.0
    latent: LatentConfig | None = None
    extra_layers: int = 0
    """Layers of the file behind those that are computed: they predict more tokens at once, and are not read."""
    draft_head: str = ""
    """Which draft head the last layer belongs to: "mtp", or a hash of its weights. "" for a model alone."""

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
    return HFReader(read_json(path, required=True), path).read()


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
        wrapper = self.fields.get("model_type")
        if isinstance(wrapper, str) and wrapper in WRAPPERS:
            self.fields = self._text_fields(wrapper)
        model_type = self._supported()
        self.fields = self._completed(model_type)
        gemma = HF_FAMILIES[model_type] == "gemma"
        layers, heads, hidden = (
            self.layers("num_hidden_layers"),
            *(self.count(name) for name in ("num_attention_heads", "hidden_size")),
        )
        latent = read_latent(model_type, self.fields, self.path)
        head_dim = self.count("head_dim", hidden // heads) if latent is None else latent.key_dim
        of_layers = LayerReader(
            self.fields,
            self.path,
            num_layers=layers,
            rope_dim=head_dim if latent is None else latent.rope_dim,
            interleaved=model_type in INTERLEAVED,
        )
        bias = model_type not in NO_BIAS and self.flag("attention_bias")
        # Granite adds r times a change to its residual. One that is 1 / r times as large adds the change as it is, and
        # has the same norms, where their eps is 1 / r^2 times as large.
        residual = self.positive("residual_multiplier")
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
            max_model_len=of_layers.max_len,
            rms_norm_eps=self.positive("rms_norm_eps") / residual**2,
            layer_windows=of_layers.windows(),
            layer_ropes=of_layers.ropes(),
            attention_scale=self._attention_scale(model_type, head_dim, latent),
            activation="clamped_swiglu" if model_type == "gpt_oss" else self._activation(gemma),
            tie_embeddings=self._is_tied(),
            qkv_bias=bias or model_type == "qwen2" or (model_type == "qwen2_moe" and self.flag("qkv_bias")),
            output_bias=self._output_bias(model_type, bias),
            mlp_bias=model_type in MLP_BIAS and self.flag("mlp_bias"),
            qk_norm=model_type in HEAD_NORMS or (model_type == "glm4_moe" and self.flag("use_qk_norm")),
            wide_qk_norm=model_type in WIDE_NORMS,
            sinks=model_type == "gpt_oss",
            fused_qkv=model_type == "phi3",
            fused_gate_up=model_type in ("phi3", "glm", "glm4"),
            experts=read_experts(model_type, self.fields, self.path, layers),
            embedding_scale=hidden**0.5 if gemma else self.number("embedding_multiplier") / residual,
            attention_softcap=self.number("attn_logit_softcapping", 0.0),
            final_softcap=self.number("final_logit_softcapping", 0.0),
            logits_divisor=self.positive("logits_scaling"),
            latent=latent,
            extra_layers=self.whole("num_nextn_predict_layers") if self._has_extra_layers(latent) else 0,
        )
        return checked(config, self.path)

    def _supported(self) -> str:
        """The model type. ModelError for what no other field needs to be read for."""
        model_type = self.fields.get("model_type")
        if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
            raise self.refuse(f"model_type {shown(model_type)}", ", ".join(HF_FAMILIES))
        if self.fields.get("use_bidirectional_attention"):
            raise self.refuse("use_bidirectional_attention", "causal attention")
        if self.fields.get("clip_qkv") is not None:
            raise self.refuse(f"clip_qkv {shown(self.fields['clip_qkv'])}", "queries, keys and values without clipping")
        return model_type

    def _completed(self, model_type: str) -> dict[str, Any]:
        """Return all fields by their usual names, with transformers' defaults for missing ones.

        `rope_parameters` has the rotary embedding in both layouts.
        """
        given = {name: value for name, value in self.fields.items() if value is not None or name in NULLS}
        fields = DEFAULTS[model_type] | given
        whole, reader = FieldReader(fields, self.path), FieldReader(given, self.path)
        for theirs, ours in (("num_local_experts", "num_experts"), *RENAMED.get(model_type, ())):
            if theirs in fields:  # keep the file's own name, for error messages
                read = {"use_bias": whole.flag, "num_shared_experts": whole.whole}.get(theirs, whole.count)
                fields[ours] = read(theirs)
        rope = reader.mapping("rope_scaling") or reader.mapping("rope_parameters")
        rope = rope or dict(fields.get("rope_parameters", {}))
        if model_type == "mistral4":  # qk_rope_head_dim also determines the rotated share
            rope.pop("partial_rotary_factor", None)
        fields["rope_parameters"] = rope
        if model_type == "minimax_m2" and "rotary_dim" in given:
            share = reader.positive("rotary_dim") / whole.positive("head_dim", 128)
            fields.setdefault("partial_rotary_factor", share)
        return fields

    def _text_fields(self, wrapper: str) -> dict[str, Any]:
        """The language model of one that also sees; files of transformers 4 may have it all in one."""
        text = self.mapping("text_config") or {name: self.fields[name] for name in self.fields if name != "text_config"}
        if text.get("model_type") not in list(HF_FAMILIES):
            text["model_type"] = WRAPPERS[wrapper]
            text = TEXT_DEFAULTS.get(wrapper, {}) | {name: value for name, value in text.items() if value is not None}
        if wrapper != "gemma3":  # some such files have it in neither object
            tied = self.fields.get("tie_word_embeddings", text.get("tie_word_embeddings"))
            text["tie_word_embeddings"] = tied
        return text

    def _is_tied(self) -> bool | None:
        return None if self.fields["tie_word_embeddings"] is None else self.flag("tie_word_embeddings")

    def _output_bias(self, model_type: str, bias: bool) -> bool:
        if model_type == "seed_oss":
            return self.flag("attention_out_bias")
        return bias and model_type not in NO_OUTPUT_BIAS

    def _has_extra_layers(self, latent: LatentConfig | None) -> bool:
        return latent is not None or self.fields["model_type"] in DEEPSEEK_LIKE

    def _attention_scale(self, model_type: str, head_dim: int, latent: LatentConfig | None) -> float:
        if latent is not None:
            return latent_scale(latent, self.mapping("rope_parameters"), self.path)
        if model_type in ("granite", "granitemoe"):
            return self.number("attention_multiplier")
        gemma = HF_FAMILIES[model_type] == "gemma"
        scale: float = self.positive("query_pre_attn_scalar") ** -0.5 if gemma else head_dim**-0.5
        return scale

    def _activation(self, gemma: bool) -> str:
        name = "hidden_activation" if gemma else "hidden_act"
        value = self.text(name)
        if value not in ACTIVATIONS:
            raise self.refuse(f"{name} {shown(value)}", ", ".join(ACTIVATIONS))
        return ACTIVATIONS[value]
