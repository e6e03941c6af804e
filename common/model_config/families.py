"""The families of models by Hugging Face's names, and what their config.json may leave out. No torch."""

from __future__ import annotations

from typing import Any

HF_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen2_moe": "llama",
    "qwen3_moe": "llama",
    "phi3": "llama",
    "gpt_oss": "llama",
    "ministral3": "llama",
    "smollm3": "llama",
    "granite": "llama",
    "seed_oss": "llama",
    "ernie4_5": "llama",
    "glm": "llama",
    "glm4_moe": "llama",
    "minimax_m2": "llama",
    "qwen3_vl_moe_text": "llama",
    "dots1": "llama",
    "solar_open": "llama",
    "exaone_moe": "llama",
    "ernie4_5_moe": "llama",
    "olmoe": "llama",
    "granitemoe": "llama",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
    "glm4_moe_lite": "deepseek",
    "mistral4": "deepseek",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gemma3": "gemma",
    "glm4": "glm4",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "exaone4": "olmo",
}
"""How the layers of a model are built: a name of `common.model.load.FAMILIES`."""
WRAPPERS = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "internvl": "qwen2",
    "kimi_k25": "kimi_k2",
}
"""Models that also see: what their `text_config`, or all of it, is where it names no family of `HF_FAMILIES` itself."""
YARN_OF_MISTRAL = {
    **{"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "llama_4_scaling_beta": 0.1,
}
GLM = {"max_position_embeddings": 131072, "attention_bias": True, "partial_rotary_factor": 0.5}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        **{"head_dim": 256, "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True},
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3_text": {
        **{"head_dim": 256, "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        **{"rope_theta": 1e6, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    },
    "mistral": {"sliding_window": 4096},
    "ministral3": {
        **{"head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        "rope_parameters": YARN_OF_MISTRAL | {"factor": 16.0, "original_max_position_embeddings": 16384},
    },
    "mistral4": {
        **{"max_position_embeddings": 1048576, "first_k_dense_replace": 0, "n_routed_experts": 128},
        **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "kv_lora_rank": 256},
        **{"q_lora_rank": 1024, "qk_nope_head_dim": 64, "routed_scaling_factor": 1.0},
        "rope_parameters": YARN_OF_MISTRAL | {"factor": 128.0, "original_max_position_embeddings": 8192},
    },
    "mixtral": {"rope_theta": 1e6, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "qwen2_moe": {"max_position_embeddings": 32768, "qkv_bias": True},
    "qwen3_moe": {"max_position_embeddings": 32768},
    "qwen3_vl_moe_text": {"max_position_embeddings": 128000, "norm_topk_prob": True},
    "deepseek_v2": {"n_shared_experts": 2},
    "deepseek_v3": {"max_position_embeddings": 4096, "n_shared_experts": 1},
    "kimi_k2": {"max_position_embeddings": 4096, "n_shared_experts": 1},
    "smollm3": {"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
    "seed_oss": {"max_position_embeddings": 524288, "attention_bias": True, "head_dim": 128},
    "ernie4_5": {
        **{"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe": {
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        "tie_word_embeddings": True,
    },
    "dots1": {
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False},
        **{"moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "sliding_window": 4096},
    },
    "solar_open": {
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128},
        **{"n_routed_experts": 128, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 0, "moe_intermediate_size": 1280, "routed_scaling_factor": 1.0},
        "intermediate_size": 1280,
    },
    "exaone_moe": {
        **{"rms_norm_eps": 1e-5, "sliding_window": 4096, "first_k_dense_replace": 1, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "n_routed_experts": 64, "moe_intermediate_size": 1024},
    },
    "olmoe": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "glm": GLM | {"head_dim": 128, "rms_norm_eps": 1.5625e-7},
    "glm4": GLM | {"head_dim": 128, "rms_norm_eps": 1.5625e-7},
    "glm4_moe": {
        **{"max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        **{"n_routed_experts": 128, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 1408, "routed_scaling_factor": 1.0},
    },
    "glm4_moe_lite": {
        **{"max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1},
        **{"n_routed_experts": 64, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
        **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
    },
    "minimax_m2": {"head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    "exaone4": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "gpt_oss": {
        **{"head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": 128},
        **{"rope_theta": 150000.0, "attention_bias": True},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
}
"""What a config.json may leave out, as transformers fills it in."""
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "ernie4_5": (("use_bias", "attention_bias"), ("use_bias", "mlp_bias")),
    "ernie4_5_moe": (("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok")),
    "exaone_moe": (("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")),
    "solar_open": (("moe_intermediate_size", "intermediate_size"),),  # no layer is without experts
}
"""Fields that other families have by another name: a model type's name and the usual one."""
WINDOWED = frozenset(
    ("mistral", "ministral3", "mixtral", "phi3", "gpt_oss", "gemma2", "gemma3_text", "olmo3", "exaone4")
    + ("exaone_moe", "dots1")
    + ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
)
"""Model types whose layers may have a sliding window."""
ASKED_FOR_WINDOWS = ("qwen", "smollm3")
"""How model types begin that have windows only with `use_sliding_window`."""
INTERLEAVED = ("ernie4_5", "ernie4_5_moe", "glm", "glm4")
"""Model types that rotate neighbours, element 2 i with element 2 i + 1."""
NO_OUTPUT_BIAS = ("qwen2", "glm", "glm4", "glm4_moe")
"""Model types whose `attention_bias` is of queries, keys and values alone."""
HEAD_NORMS = ("gemma3_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "exaone4", "exaone_moe", "dots1")
"""Model types that normalise each head of queries and keys."""
WIDE_NORMS = ("olmo2", "olmo3", "olmoe", "minimax_m2")
"""Model types that normalise the heads of queries, and those of keys, as one."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
