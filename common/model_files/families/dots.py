"""rednote's dots.llm1."""

from __future__ import annotations

from functools import partial

from common.model_files.architecture import gguf_grouped_experts, grouped_experts
from common.model_files.families.deepseek import ONE_GROUP
from common.model_files.families.family import ExpertFacts, Family, GGUFFacts, Windows, sizes

FAMILIES = (
    Family(
        model_type="dots1",
        defaults=sizes(152064, 4608, 10944, 62, 32, 32, 2048)
        | ONE_GROUP
        | {
            **{"sliding_window": 4096, "max_window_layers": 62, "n_shared_experts": None, "norm_topk_prob": False},
            **{"first_k_dense_replace": 0, "moe_intermediate_size": 1408},
        },
        qk_norm="head",
        windows=Windows(slides=lambda layer, first: layer >= first),
        experts=ExpertFacts(
            read=partial(grouped_experts, scoring=("sigmoid", "noaux_tc")), read_gguf=gguf_grouped_experts
        ),
        mtp="unread",
        gguf=GGUFFacts(architecture="dots1"),
    ),
)
