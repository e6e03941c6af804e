"""Google's Gemma 2 and 3: norms before and after attention and MLP, alternating windows."""

from __future__ import annotations

from collections.abc import Mapping

from common.model_files.architecture import FieldReader, RopeConfig
from common.model_files.families.family import Family, GGUFFacts, NormPlace, Windows, sizes

DEFAULTS = {
    **{"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True},
    **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"},
}
NORMS: Mapping[NormPlace, str] = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}


def _scale(reader: FieldReader) -> float:
    scale: float = reader.positive("query_pre_attn_scalar") ** -0.5
    return scale


FAMILIES = (
    Family(
        model_type="gemma2",
        defaults=sizes(256000, 2304, 9216, 26, 8, 4, 8192)
        | DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        decoder="gemma",
        norms=NORMS,
        activation="gelu_tanh",
        activation_field="hidden_activation",
        windows=Windows(period=2),
        attention_scale=_scale,
        embeds_by_width=True,
        offset_norms=True,
        gguf=GGUFFacts(architecture="gemma2", window=(4096, 2), width_scaled_layers=46),
    ),
    Family(
        model_type="gemma3_text",
        defaults=sizes(262208, 2304, 9216, 26, 8, 4, 131072)
        | DEFAULTS
        | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
        wrappers={"gemma3": {}},
        wrapper_ties=False,
        decoder="gemma",
        norms=NORMS,
        qk_norm="head",
        activation="gelu_tanh",
        activation_field="hidden_activation",
        windows=Windows(period="sliding_window_pattern"),
        local_theta=lambda reader, theta: reader.positive("rope_local_base_freq"),
        attention_scale=_scale,
        embeds_by_width=True,
        offset_norms=True,
        gguf=GGUFFacts(
            architecture="gemma3",
            window=(None, 6),
            local_rope=lambda reader, full: RopeConfig(
                reader.number("rope.freq_base_swa", 10000.0), rotary_dim=full.rotary_dim
            ),
            width_scaled_layers=62,
        ),
    ),
)
