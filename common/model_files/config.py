"""A model's architecture, and how Hugging Face's config.json describes it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError, shown
from common.model_files.architecture.experts import ExpertsConfig
from common.model_files.architecture.fields import FieldReader
from common.model_files.architecture.latent import LatentConfig, latent_scale, read_latent
from common.model_files.architecture.layers import LayerReader
from common.model_files.architecture.rope import RopeConfig
from common.model_files.families import FAMILIES, WRAPPERS, Family
from common.model_files.json_file import read_json

TANH_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
"""Transformers' names of the same activation function."""
ACTIVATIONS = {"silu": "silu", "swish": "silu"} | dict.fromkeys(TANH_GELUS, "gelu_tanh")
NULLS = frozenset(
    ("head_dim", "num_key_value_heads", "sliding_window", "q_lora_rank", "n_shared_experts", "tie_word_embeddings")
    + ("attn_logit_softcapping", "final_logit_softcapping")
)
"""Fields for which null is a value. Any other field that is null counts as missing."""


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
    def family(self) -> Family:
        """What sets models of this type apart."""
        return FAMILIES[self.model_type]

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
        family = self._supported()
        self.fields = self._completed(family)
        layers, heads, hidden = (
            self.layers("num_hidden_layers"),
            *(self.count(name) for name in ("num_attention_heads", "hidden_size")),
        )
        latent = read_latent(self, neighbours=family.latents == "neighbours") if family.latents else None
        head_dim = self.count("head_dim", hidden // heads) if latent is None else latent.key_dim
        rope_dim = head_dim if latent is None else latent.rope_dim
        of_layers = LayerReader(self.fields, self.path, family, num_layers=layers, rope_dim=rope_dim)
        # Granite adds r times a change to its residual. One that is 1 / r times as large adds the change as it is, and
        # has the same norms, where their eps is 1 / r^2 times as large.
        residual = self.positive("residual_multiplier")
        config = ModelConfig(
            model_type=family.model_type,
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
            attention_scale=self._attention_scale(family, head_dim, latent),
            activation=self._activation(family),
            tie_embeddings=self._is_tied(),
            qkv_bias=self._is(family.qkv_bias),
            output_bias=self._is(family.output_bias),
            mlp_bias=self._is(family.mlp_bias),
            qk_norm=family.qk_norm == "head" or (family.qk_norm == "use_qk_norm" and self.flag("use_qk_norm")),
            wide_qk_norm=family.qk_norm == "heads",
            sinks=family.sinks,
            fused_qkv=family.fused_qkv,
            fused_gate_up=family.fused_gate_up,
            experts=family.experts.read(self, layers),
            embedding_scale=hidden**0.5 if family.embeds_by_width else self.number("embedding_multiplier") / residual,
            attention_softcap=self.number("attn_logit_softcapping", 0.0),
            final_softcap=self.number("final_logit_softcapping", 0.0),
            logits_divisor=self.positive("logits_scaling"),
            latent=latent,
            extra_layers=self.whole("num_nextn_predict_layers") if family.mtp else 0,
        )
        return checked(config, self.path)

    def _supported(self) -> Family:
        """The model's family. ModelError for what no other field needs to be read for."""
        model_type = self.fields.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise self.refuse(f"model_type {shown(model_type)}", ", ".join(FAMILIES))
        if self.fields.get("use_bidirectional_attention"):
            raise self.refuse("use_bidirectional_attention", "causal attention")
        if self.fields.get("clip_qkv") is not None:
            raise self.refuse(f"clip_qkv {shown(self.fields['clip_qkv'])}", "queries, keys and values without clipping")
        return FAMILIES[model_type]

    def _completed(self, family: Family) -> dict[str, Any]:
        """Return all fields by their usual names, with transformers' defaults for missing ones.

        `rope_parameters` has the rotary embedding in both layouts.
        """
        given = {name: value for name, value in self.fields.items() if value is not None or name in NULLS}
        fields = {**family.defaults, **given}
        whole, reader = FieldReader(fields, self.path), FieldReader(given, self.path)
        for theirs, ours in (("num_local_experts", "num_experts"), *family.renamed):
            if theirs in fields:  # keep the file's own name, for error messages
                read = {"use_bias": whole.flag, "num_shared_experts": whole.whole}.get(theirs, whole.count)
                fields[ours] = read(theirs)
        rope = reader.mapping("rope_scaling") or reader.mapping("rope_parameters")
        fields["rope_parameters"] = rope or dict(fields.get("rope_parameters", {}))
        if family.complete is not None:
            family.complete(fields, reader)
        return fields

    def _text_fields(self, wrapper: str) -> dict[str, Any]:
        """The language model of one that also sees; files of transformers 4 may have it all in one."""
        text = self.mapping("text_config") or {name: self.fields[name] for name in self.fields if name != "text_config"}
        family = WRAPPERS[wrapper]
        if text.get("model_type") not in list(FAMILIES):
            given = {name: value for name, value in text.items() if value is not None}
            text = {**family.wrappers[wrapper], **given, "model_type": family.model_type}
        if family.wrapper_ties:
            tied = self.fields.get("tie_word_embeddings", text.get("tie_word_embeddings"))
            text["tie_word_embeddings"] = tied
        return text

    def _is_tied(self) -> bool | None:
        return None if self.fields["tie_word_embeddings"] is None else self.flag("tie_word_embeddings")

    def _is(self, fact: bool | str) -> bool:
        """A fact that may be in a field."""
        return self.flag(fact) if isinstance(fact, str) else fact

    def _attention_scale(self, family: Family, head_dim: int, latent: LatentConfig | None) -> float:
        if latent is not None:
            return latent_scale(latent, self.mapping("rope_parameters"), self.path)
        scale: float = head_dim**-0.5 if family.attention_scale is None else family.attention_scale(self)
        return scale

    def _activation(self, family: Family) -> str:
        name = family.activation_field
        if not name:
            return family.activation
        value = self.text(name)
        if value not in ACTIVATIONS:
            raise self.refuse(f"{name} {shown(value)}", ", ".join(ACTIVATIONS))
        return ACTIVATIONS[value]
