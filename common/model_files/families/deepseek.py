"""DeepSeek V2 and V3, and Moonshot's Kimi K2, which has the architecture of DeepSeek V3."""

from __future__ import annotations

from functools import partial

from common.model_files.architecture import SIGMOID_GATING, gguf_grouped_experts, grouped_experts
from common.model_files.families.family import ExpertFacts, Family, GGUFFacts, sizes

LATENTS = {
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "rope_interleave": True,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
V3_EXPERTS = ExpertFacts(read=grouped_experts, read_gguf=gguf_grouped_experts)
MSCALE = 10.0
"""llama.cpp's converter writes a tenth of DeepSeek's multiplier."""
V3_DEFAULTS = (
    sizes(129280, 7168, 18432, 61, 128, 128, 4096)
    | LATENTS
    | {
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048},
        **{"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "first_k_dense_replace": 3,
    }
)
FAMILIES = (
    Family(
        model_type="deepseek_v2",
        defaults=sizes(102400, 4096, 11008, 32, 32, None, 2048)
        | LATENTS
        | {
            **{"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
            **{"topk_method": "greedy", "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
        },
        decoder="deepseek",
        experts=ExpertFacts(
            read=partial(
                grouped_experts,
                methods=("greedy", "group_limited_greedy"),
                scoring=("softmax",),
                sigmoid=False,
                normalises=False,
                at_least=1,
            ),
            read_gguf=partial(gguf_grouped_experts, sigmoid=False),
        ),
        latents="neighbours",
        mtp="unread",
        gguf=GGUFFacts(architecture="deepseek2", mscale=MSCALE),
    ),
    Family(
        model_type="deepseek_v3",
        defaults=V3_DEFAULTS,
        decoder="deepseek",
        experts=V3_EXPERTS,
        latents="by_field",
        mtp="drafts",
        gguf=GGUFFacts(
            architecture="deepseek2",
            applies=lambda reader: reader.number("expert_gating_func", 0) == SIGMOID_GATING,
            mscale=MSCALE,
        ),
    ),
    Family(
        model_type="kimi_k2",
        defaults=V3_DEFAULTS,
        wrappers={"kimi_k25": {}},
        decoder="deepseek",
        experts=V3_EXPERTS,
        latents="by_field",
        mtp="unread",
    ),
)
