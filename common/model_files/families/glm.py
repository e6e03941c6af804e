"""Z.ai's GLM-4 9B, GLM-4-0414, GLM-4.5 to 4.7, and GLM-4.7-Flash, which has the architecture of DeepSeek V3."""

from __future__ import annotations

from common.model_files.families.deepseek import LATENTS, ONE_GROUP, V3_EXPERTS
from common.model_files.families.family import GGUF_NORMS, Family, GGUFFacts, sizes

DENSE = sizes(151552, 4096, 13696, 40, 32, 2, 131072) | {
    **{"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
}
FAMILIES = (
    Family(model_type="glm", defaults=DENSE, output_bias=False, fused_gate_up=True, neighbours=True),
    Family(
        model_type="glm4",
        defaults=DENSE,
        decoder="gemma",
        norms={
            "before_attention": "input_layernorm",
            "after_attention": "post_self_attn_layernorm",
            "before_mlp": "post_attention_layernorm",
            "after_mlp": "post_mlp_layernorm",
        },
        output_bias=False,
        fused_gate_up=True,
        neighbours=True,
        gguf=GGUFFacts(architecture="glm4"),
    ),
    Family(
        model_type="glm4_moe",
        defaults=sizes(151552, 4096, 10944, 46, 96, 8, 131072)
        | ONE_GROUP
        | {
            **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "use_qk_norm": False, "n_routed_experts": 128},
            **{"num_experts_per_tok": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 1408},
        },
        qk_norm="use_qk_norm",
        output_bias=False,
        experts=V3_EXPERTS,
        mtp="drafts",
        gguf=GGUFFacts(architecture="glm4moe", norms={**GGUF_NORMS, "before_mlp": "post_attention_norm"}),
    ),
    Family(
        model_type="glm4_moe_lite",
        defaults=sizes(154880, 2048, 10240, 47, 20, 20, 202752)
        | LATENTS
        | ONE_GROUP
        | {
            **{"rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
            **{"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
            **{"routed_scaling_factor": 1.8, "first_k_dense_replace": 1},
        },
        decoder="deepseek",
        experts=V3_EXPERTS,
        latents="by_field",
        mtp="unread",
    ),
)
