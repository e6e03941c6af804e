"""Upstage's Solar Open."""

from __future__ import annotations

from common.model_files.families.deepseek import ONE_GROUP, V3_EXPERTS
from common.model_files.families.family import Family, sizes

FAMILIES = (
    Family(
        model_type="solar_open",
        defaults=sizes(196608, 4096, 1280, 48, 64, 8, 131072)
        | ONE_GROUP
        | {
            **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "n_routed_experts": 128},
            **{"num_experts_per_tok": 8, "first_k_dense_replace": 0, "moe_intermediate_size": 1280},
        },
        renamed=(("moe_intermediate_size", "intermediate_size"),),  # all layers have experts
        experts=V3_EXPERTS,
        mtp="unread",
    ),
)
