"""Model configuration, and its reader for Hugging Face's config.json. Does not load torch."""

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
"""Names in transformers for the same activation function."""
ACTIVATIONS = {"silu": "silu", "swish": "silu"} | dict.fromkeys(TANH_GELUS, "gelu_tanh")
NULLS = frozenset(
    ("head_dim", "num_key_value_heads", "sliding_window", "q_lora_rank", "n_shared_experts", "tie_word_embeddings")
    + ("attn_logit_softcapping", "final_logit_softcapping")
)
"""Fields for which null is a value. All other fields that are null count as missing."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a decoder-only model.

    `layer_windows[i]` is the number of tokens that layer i attends to, including the current one (0: all), and
    `layer_ropes[i]` is its rotary embedding. `attention_scale` multiplies q.k. Softcaps of 0 are off. Logits are
    divided by `logits_divisor`. With `qk_norm`, each head of queries and keys is normalised; with `wide_qk_norm`, all
    heads together. With `sinks`, attention has one more logit per head. `fused_qkv` and `fused_gate_up`: the file
    stores these in one matrix. Layers with `experts` use them instead of the MLP of `intermediate_size`. With `latent`,
    the cache stores one KV head of `head_dim` numbers per token, which are keys and values of all heads.
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
    """None: tied if the file has no output head."""
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
    """Layers of the file after those that are computed (multi-token prediction). They are not loaded."""
    draft_head: str = ""
    """Draft head of the last layer: "mtp", or a hash of its weights. "" if the model has none."""

    @property
    def family(self) -> Family:
        """Facts about models of this type."""
        return FAMILIES[self.model_type]

    @property
    def kv_numbers(self) -> int:
        """Numbers that the cache stores per token: keys and values of all layers, or their latents."""
        return self.num_layers * self.num_kv_heads * self.head_dim * (2 if self.latent is None else 1)

    @property
    def rope_dim(self) -> int:
        """Size of the rotated part of a head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Size of the attention output of a head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def latent_dim(self) -> int:
        """Leading elements of a key that are also its value, or 0 if values are stored separately."""
        return 0 if self.latent is None else self.latent.rank

    @property
    def window(self) -> int:
        """Widest window of all layers, in tokens, or 0 if some layer attends to the whole context."""
        widest = max(self.layer_windows) if all(self.layer_windows) else 0
        return widest if widest < self.max_model_len else 0


def from_hf(path: Path) -> ModelConfig:
    """Read a config.json. Raises ModelError if it is missing, damaged, or of an unsupported model."""
    return HFReader(read_json(path, required=True), path).read()


def checked(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the configuration if its numbers are consistent. Raises ModelError."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{path}: {config.num_heads} attention heads are not a multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"{path}: head_dim {config.head_dim} is odd: rotary embedding needs an even number")
    return config


class HFReader(FieldReader):
    """Reader of Hugging Face's config.json, in the layouts of transformers 4 and 5."""

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
        # Granite multiplies each update of the residual by r. Dividing the residual by r instead leaves updates
        # unscaled, and norms are unchanged if their eps is divided by r^2.
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
        """Return the family of the model. Raises ModelError for unsupported features."""
        model_type = self.fields.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise self.refuse(f"model_type {shown(model_type)}", ", ".join(FAMILIES))
        if self.fields.get("use_bidirectional_attention"):
            raise self.refuse("use_bidirectional_attention", "causal attention")
        if self.fields.get("clip_qkv") is not None:
            raise self.refuse(f"clip_qkv {shown(self.fields['clip_qkv'])}", "queries, keys and values without clipping")
        return FAMILIES[model_type]

    def _completed(self, family: Family) -> dict[str, Any]:
        """Return all fields by their usual names, with the defaults of transformers for missing ones.

        `rope_parameters` has the rotary embedding in both layouts.
        """
        given = {name: value for name, value in self.fields.items() if value is not None or name in NULLS}
        fields = {**family.defaults, **given}
        whole, reader = FieldReader(fields, self.path), FieldReader(given, self.path)
        for theirs, ours in (("num_local_experts", "num_experts"), *family.renamed):
            if theirs in fields:  # validated under the file's own name, for error messages
                read = {"use_bias": whole.flag, "num_shared_experts": whole.whole}.get(theirs, whole.count)
                fields[ours] = read(theirs)
        rope = reader.mapping("rope_scaling") or reader.mapping("rope_parameters")
        fields["rope_parameters"] = rope or dict(fields.get("rope_parameters", {}))
        if family.complete is not None:
            family.complete(fields, reader)
        return fields

    def _text_fields(self, wrapper: str) -> dict[str, Any]:
        """Return the fields of a multimodal model's language model. transformers 4 may omit `text_config`."""
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
        """Return a fact, or the value of the field that has it."""
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
