"""LG's EXAONE 4 and K-EXAONE, whose layers without a window have no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from common.model_files.families.deepseek import ONE_GROUP, V3_EXPERTS
from common.model_files.families.family import POST_NORM, Family, GGUFFacts, Windows, sizes

WINDOWS = Windows(period="sliding_window_pattern")
FAMILIES = (
    Family(
        model_type="exaone4",
        defaults=sizes(102400, 4096, 16384, 32, 32, 32, 2048)
        | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        decoder="olmo",
        norms=POST_NORM,
        qk_norm="head",
        qkv_bias=False,
        output_bias=False,
        windows=WINDOWS,
        rotates="window",
        gguf=GGUFFacts(architecture="exaone4", window=(0, 4)),
    ),
    Family(
        model_type="exaone_moe",
        defaults=sizes(102400, 4096, 16384, 32, 32, 32, 2048)
        | ONE_GROUP
        | {
            **{"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
            **{"routed_scaling_factor": 2.5, "n_routed_experts": 64, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 1024, "first_k_dense_replace": 1},
        },
        renamed=(("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")),
        qk_norm="head",
        qkv_bias=False,
        output_bias=False,
        windows=WINDOWS,
        rotates="window",
        experts=replace(V3_EXPERTS, correction="mlp"),
        mtp="unread",
    ),
)
