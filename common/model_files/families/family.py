"""Facts about a model family: configuration, layers, and tensor names. Does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from common.model_files.architecture import ExpertsConfig, ExpertStack, FieldReader, RopeConfig, gguf_experts

DecoderName = Literal["llama", "deepseek", "gemma", "olmo"]
NormPlace = Literal["before_attention", "after_attention", "before_mlp", "after_mlp"]
PRE_NORM: Mapping[NormPlace, str] = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
POST_NORM: Mapping[NormPlace, str] = {
    "after_attention": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
GGUF_NORMS: Mapping[NormPlace, str] = {
    "before_attention": "attn_norm",
    "after_attention": "post_attention_norm",
    "before_mlp": "ffn_norm",
    "after_mlp": "post_ffw_norm",
}
USUAL: Mapping[str, Any] = {
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    **{"attention_bias": False, "mlp_bias": False, "head_dim": None, "sliding_window": None},
    **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0},
}
"""Defaults of config.json that most families share."""


def sizes(*numbers: int | None) -> dict[str, Any]:
    """Return a family's defaults of config.json, including `USUAL`.

    Order: vocabulary, hidden size, MLP size, layers, heads, KV heads (None: the heads), context length.
    """
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(USUAL) | dict(zip((*names, "num_key_value_heads", "max_position_embeddings"), numbers, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Layers with a sliding window, for configurations without `layer_types`.

    With `asked_for`, there are none unless `use_sliding_window` is set. The last layer of each `period` (a number, or
    the field that has it) has full attention. Without a period, `slides` maps a layer and `max_window_layers` to a
    flag.
    """

    asked_for: bool = False
    period: int | str = 0
    slides: Callable[[int, int], bool] = lambda layer, first: True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """Fields and tensor names of a layer's experts.

    `read` takes the completed fields of config.json, `read_gguf` the metadata. Both take the number of layers, and
    return None for a model without experts. Names follow `model.layers.N.`. `correction` is the module of
    `e_score_correction_bias` ("": the router). With `stack`, a file may store all experts of a layer in one tensor.
    """

    read: Callable[[FieldReader, int], ExpertsConfig | None] = lambda reader, num_layers: None
    read_gguf: Callable[[FieldReader, int], ExpertsConfig | None] = gguf_experts
    router: str = "mlp.gate"
    module: str = "mlp.experts"
    gates: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    correction: str = ""
    stack: ExpertStack | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFacts:
    """Facts about llama.cpp's files of a family, including defaults that llama.cpp builds in.

    Families may share an `architecture`: `applies` reports whether metadata are of this one, and is None for the family
    of all other files. `window` is the default of `attention.sliding_window` (None: required), and the period of full
    attention (0: none). `local_rope` maps the rotary embedding of full layers to that of layers with a window. `norms`
    are the names of norms by position. With `interleaves`, the converter reorders the rows of each head of q and k to
    neighbouring pairs. With `output_bias`, attention has one. Models of `width_scaled_layers` layers divide scores by
    sqrt(hidden_size / num_heads). `mscale` multiplies YaRN's logarithmic multiplier. With `truncates`, YaRN rounds its
    range of dimensions.
    """

    architecture: str
    applies: Callable[[FieldReader], bool] | None = None
    window: tuple[int | None, int] | None = None
    local_rope: Callable[[FieldReader, RopeConfig], RopeConfig] | None = None
    norms: Mapping[NormPlace, str] = field(default_factory=lambda: GGUF_NORMS)
    interleaves: bool = False
    output_bias: bool = False
    width_scaled_layers: int = 0
    mscale: float = 1.0
    truncates: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face. Fields default to Llama's values.

    Configuration

    defaults     defaults of config.json, from transformers' configuration class
    wrappers     model types of multimodal models whose `text_config` is of this family unless it names another, each
                 with the defaults in which its language model differs
    wrapper_ties `tie_word_embeddings` is read from the wrapper; if False, it may be missing in both objects
    renamed      pairs of this family's field name and the usual one
    complete     changes the completed fields; its reader has only the fields of the file

    Layers

    decoder      the forward pass: a name of `common.engine.models.DECODERS`
    norms        positions and names of a layer's norms of hidden states
    qk_norm      norms of queries and keys: of each "head", of all "heads" together, of each head if the field
                 `use_qk_norm` is set, or none ("")
    *_bias       always, never, or as the named field specifies
    activation   in GGUF files, and in config.json if `activation_field` is ""
    rotates      layers with rotary embedding: "all", those with a "window" (all if there are none), or those that the
                 field `no_rope_layers` lists ("listed")
    neighbours   element 2 i is rotated with element 2 i + 1
    local_theta  maps the reader and `rope_theta` to the base of layers with a window, if that may differ
    attention_scale  factor of scores; None: 1 / sqrt(head_dim)
    embeds_by_width  embeddings are multiplied by sqrt(hidden_size), rounded to the model's type
    offset_norms     safetensors store norm weights minus one
    latents      latent attention as in DeepSeek V2, with rotated "neighbours", or as `rope_interleave` specifies
                 ("by_field")
    mtp          multi-token prediction layers may follow: "unread", or "drafts" for a draft head
    """

    model_type: str
    defaults: Mapping[str, Any]
    wrappers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    wrapper_ties: bool = True
    renamed: tuple[tuple[str, str], ...] = ()
    complete: Callable[[dict[str, Any], FieldReader], None] | None = None
    decoder: DecoderName = "llama"
    norms: Mapping[NormPlace, str] = field(default_factory=lambda: PRE_NORM)
    qk_norm: Literal["", "head", "heads", "use_qk_norm"] = ""
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    sinks: bool = False
    activation: str = "silu"
    activation_field: str = "hidden_act"
    windows: Windows | None = None
    rotates: Literal["all", "window", "listed"] = "all"
    neighbours: bool = False
    local_theta: Callable[[FieldReader, float], float] | None = None
    attention_scale: Callable[[FieldReader], float] | None = None
    embeds_by_width: bool = False
    offset_norms: bool = False
    experts: ExpertFacts = field(default_factory=ExpertFacts)
    latents: Literal["", "neighbours", "by_field"] = ""
    mtp: Literal["", "unread", "drafts"] = ""
    gguf: GGUFFacts | None = None
