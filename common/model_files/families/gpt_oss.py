"""OpenAI's gpt-oss: experts with biases and a bounded gate, attention sinks, alternating windows."""

from __future__ import annotations

from functools import partial

from common.errors import shown
from common.model_files.architecture import ExpertsConfig, ExpertStack, FieldReader, experts_in_all_layers, gguf_experts
from common.model_files.families.family import GGUF_NORMS, ExpertFacts, Family, GGUFFacts, Windows, sizes

SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Parameters of the kernels' "clamped_swiglu"."""


def _experts(reader: FieldReader, num_layers: int) -> ExpertsConfig:
    found = experts_in_all_layers(reader, num_layers, biased=True)
    for name, value in SWIGLU.items():
        if reader.number(name, value) != value:
            raise reader.refuse(f"{name} {shown(reader.fields[name])}", f"{name} {value:g}")
    return found


FAMILIES = (
    Family(
        model_type="gpt_oss",
        defaults=sizes(201088, 2880, 2880, 36, 64, 8, 131072)
        | {
            **{"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150000.0},
            **{"attention_bias": True, "num_experts": 128, "num_experts_per_tok": 4},
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            },
        },
        sinks=True,
        activation="clamped_swiglu",
        activation_field="",
        windows=Windows(period=2),
        experts=ExpertFacts(
            read=_experts,
            read_gguf=partial(gguf_experts, biased=True),
            router="mlp.router",
            stack=ExpertStack("mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs_first=True, alternating=True),
        ),
        gguf=GGUFFacts(
            architecture="gpt-oss",
            window=(None, 2),
            norms={**GGUF_NORMS, "before_mlp": "post_attention_norm"},
            output_bias=True,
            truncates=False,
        ),
    ),
)
