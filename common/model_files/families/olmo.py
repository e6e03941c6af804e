"""Ai2's OLMo 2 and 3, with norms after attention and MLP, and OLMoE."""

from __future__ import annotations

from functools import partial

from common.model_files.architecture import RopeConfig, experts_in_all_layers, gguf_experts
from common.model_files.families.family import POST_NORM, ExpertFacts, Family, GGUFFacts, Windows, sizes

DENSE = sizes(50304, 4096, 11008, 32, 32, None, 2048) | {"rms_norm_eps": 1e-5}
FAMILIES = (
    Family(
        model_type="olmo2",
        defaults=DENSE,
        decoder="olmo",
        norms=POST_NORM,
        qk_norm="heads",
        gguf=GGUFFacts(architecture="olmo2"),
    ),
    Family(
        model_type="olmo3",
        defaults=DENSE | {"rope_theta": 500000.0, "sliding_window": 4096},
        decoder="olmo",
        norms=POST_NORM,
        qk_norm="heads",
        windows=Windows(period=4),
        local_theta=lambda reader, theta: theta,
        gguf=GGUFFacts(
            architecture="olmo2",
            applies=lambda reader: bool(reader.number("attention.sliding_window", 0)),
            window=(None, 4),
            local_rope=lambda reader, full: RopeConfig(full.theta),
        ),
    ),
    Family(
        model_type="olmoe",
        defaults=sizes(50304, 2048, 2048, 16, 16, None, 4096)
        | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        qk_norm="heads",
        experts=ExpertFacts(
            read=partial(experts_in_all_layers, normalised="norm_topk_prob"),
            read_gguf=partial(gguf_experts, inner="feed_forward_length", normalised=False),
        ),
        gguf=GGUFFacts(architecture="olmoe"),
    ),
)
