"""Tiny models of the families that are compared with transformers: its name of each, and what differs from `SIZES`."""

from __future__ import annotations

from typing import Any

PHI_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 12,
    "long_factor": [1.0 + 0.3 * i for i in range(12)],
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LATENT: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "v_head_dim": 24},
    **{"qk_nope_head_dim": 40, "qk_rope_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 48},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4, "topk_group": 2},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 32, "tie_word_embeddings": False},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "phi4-mini": (
        "Phi3",
        {
            **{"pad_token_id": 0, "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 50},
            **{"rope_parameters": PHI_LONG, "original_max_position_embeddings": 64, "tie_word_embeddings": True},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 20, "head_dim": 32}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64},
            **{"shared_expert_intermediate_size": 96, "decoder_sparse_step": 2},
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **{"num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "norm_topk_prob": True},
            **{"head_dim": 32, "mlp_only_layers": [1]},
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 20},
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0, "attention_bias": True},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {
            **(LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "kv_lora_rank": 40}),
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_shared_experts": 1},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        LATENT | {"rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "ministral3": (
        "Ministral3",
        {
            **{"head_dim": 32, "pad_token_id": 0},
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            **{"pad_token_id": 0, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24},
            "tie_word_embeddings": False,
        },
    ),
    "granite": (
        "Granite",
        {
            **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2},
            **{"logits_scaling": 8.0, "pad_token_id": 0},
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True, "pad_token_id": 0}),
    "ernie": ("Ernie4_5", {"head_dim": 32, "use_bias": True, "pad_token_id": 0}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 32, "pad_token_id": 0}),
    "glm4-moe": (
        "Glm4Moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32},
            **{"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "mistral4": (
        "Mistral4",
        {
            **(LATENT | {"n_group": 1, "topk_group": 1, "pad_token_id": 0}),
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "dots1": (
        "Dots1",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "sliding_window": 24, "max_window_layers": 1, "head_dim": 32},
        },
    ),
    "solar-open": (
        "SolarOpen",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32},
            "pad_token_id": 0,
        },
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "sliding_window": 20},
            **{"sliding_window_pattern": 2, "pad_token_id": 0},
        },
    ),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {
            **{"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48, "pad_token_id": 0},
            "tie_word_embeddings": False,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0}),
    "granite-moe": (
        "GraniteMoe",
        {
            **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2},
            **{"logits_scaling": 6.0, "num_local_experts": 5, "num_experts_per_tok": 3, "pad_token_id": 0},
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "olmo3": (
        "Olmo3",
        {
            **{"pad_token_id": 0, "sliding_window": 24, "num_hidden_layers": 4},
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 20, "sliding_window_pattern": 2, "pad_token_id": 0}),
    "exaone4-full": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "pad_token_id": 0, "num_key_value_heads": 6},
    ),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn-mscale": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "yarn-untruncated": ("Llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
}
