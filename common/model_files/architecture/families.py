"""Model families by Hugging Face's names, and the defaults of their config.json. No torch."""

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
    "glm4": "glm4",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "exaone4": "olmo",
}
"""How the layers of a model are built: a name of `common.engine.models.load.FAMILIES`."""
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
USUAL: dict[str, Any] = {
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    **{"attention_bias": False, "mlp_bias": False, "head_dim": None, "sliding_window": None},
    **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0},
}
"""Defaults that apply to most model types."""


def _sizes(*sizes: int | None) -> dict[str, Any]:
    """Return the defaults of a model type, including `USUAL`. The number of KV heads defaults to that of the heads."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return USUAL | dict(zip((*names, "num_key_value_heads", "max_position_embeddings"), sizes, strict=True))


WINDOW_IF_ASKED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
QWEN_MOE = WINDOW_IF_ASKED | {"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False}
LLAMA = _sizes(32000, 4096, 11008, 32, 32, None, 2048)
GLM = _sizes(151552, 4096, 13696, 40, 32, 2, 131072) | {
    **{"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
}
OLMO = _sizes(50304, 4096, 11008, 32, 32, None, 2048) | {"rms_norm_eps": 1e-5}
GEMMA = {
    **{"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True},
    **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"},
}
LATENTS = {
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "rope_interleave": True,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
DEEPSEEK_V3 = (
    _sizes(129280, 7168, 18432, 61, 128, 128, 4096)
    | LATENTS
    | {
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048},
        **{"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "first_k_dense_replace": 3,
    }
)
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 8, 131072) | {"sliding_window": 4096},
    "mixtral": _sizes(32000, 4096, 14336, 32, 32, 8, 131072)
    | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _sizes(151936, 4096, 22016, 32, 32, 32, 32768) | WINDOW_IF_ASKED,
    "qwen3": _sizes(151936, 4096, 22016, 32, 32, 32, 32768) | WINDOW_IF_ASKED | {"head_dim": 128},
    "qwen2_moe": _sizes(151936, 2048, 5632, 24, 16, 16, 32768)
    | QWEN_MOE
    | {
        **{"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": _sizes(151936, 2048, 6144, 24, 32, 4, 32768)
    | QWEN_MOE
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3_vl_moe_text": _sizes(151936, 2048, 5632, 24, 16, 16, 128000)
    | QWEN_MOE
    | {
        **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": True},
        **{"tie_word_embeddings": True, "rope_theta": 500000.0},
    },
    "phi3": _sizes(32064, 3072, 8192, 32, 32, None, 4096)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "gpt_oss": _sizes(201088, 2880, 2880, 36, 64, 8, 131072)
    | {
        **{"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150000.0},
        **{"attention_bias": True, "num_experts": 128, "num_experts_per_tok": 4},
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
    "ministral3": _sizes(131072, 4096, 14336, 34, 32, 8, 262144)
    | {
        **{"head_dim": 128, "rms_norm_eps": 1e-5},
        "rope_parameters": YARN_OF_MISTRAL
        | {"factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6},
    },
    "smollm3": _sizes(128256, 2048, 11008, 36, 16, 4, 32768)
    | {"rope_theta": 2e6, "tie_word_embeddings": True, "use_sliding_window": False, "no_rope_layer_interval": 4},
    "granite": LLAMA,
    "granitemoe": LLAMA | {"num_experts": 8, "num_experts_per_tok": 2},
    "seed_oss": _sizes(155136, 4096, 27648, 64, 80, 8, 524288)
    | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False},
    "ernie4_5": _sizes(103424, 1024, 3072, 18, 16, 2, 131072)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
    "ernie4_5_moe": _sizes(103424, 2560, 12288, 28, 20, 4, 131072)
    | {
        **{"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False},
        **{"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    },
    "minimax_m2": _sizes(200064, 3072, 1536, 62, 48, 8, 196608)
    | {"head_dim": 128, "rope_theta": 5e6, "num_experts": 256, "num_experts_per_tok": 8},
    "olmoe": _sizes(50304, 2048, 2048, 16, 16, None, 4096)
    | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    "dots1": _sizes(152064, 4608, 10944, 62, 32, 32, 2048)
    | ONE_GROUP
    | {
        **{"sliding_window": 4096, "max_window_layers": 62, "n_shared_experts": None, "norm_topk_prob": False},
        **{"first_k_dense_replace": 0, "moe_intermediate_size": 1408},
    },
    "solar_open": _sizes(196608, 4096, 1280, 48, 64, 8, 131072)
    | ONE_GROUP
    | {
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "n_routed_experts": 128},
        **{"num_experts_per_tok": 8, "first_k_dense_replace": 0, "moe_intermediate_size": 1280},
    },
    "exaone_moe": _sizes(102400, 4096, 16384, 32, 32, 32, 2048)
    | ONE_GROUP
    | {
        **{"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "routed_scaling_factor": 2.5},
        **{"n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024},
        "first_k_dense_replace": 1,
    },
    "glm4_moe": _sizes(151552, 4096, 10944, 46, 96, 8, 131072)
    | ONE_GROUP
    | {
        **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "use_qk_norm": False, "n_routed_experts": 128},
        **{"num_experts_per_tok": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 1408},
    },
    "deepseek_v2": _sizes(102400, 4096, 11008, 32, 32, None, 2048)
    | LATENTS
    | {
        **{"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "topk_method": "greedy"},
        **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    },
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "glm4_moe_lite": _sizes(154880, 2048, 10240, 47, 20, 20, 202752)
    | LATENTS
    | ONE_GROUP
    | {
        **{"rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
        **{"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
        **{"routed_scaling_factor": 1.8, "first_k_dense_replace": 1},
    },
    "mistral4": _sizes(131072, 4096, 12288, 36, 32, 32, 1048576)
    | LATENTS
    | ONE_GROUP
    | {
        **{"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "n_routed_experts": 128},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 0},
        "rope_parameters": YARN_OF_MISTRAL | {"factor": 128.0, "original_max_position_embeddings": 8192},
    },
    "gemma2": _sizes(256000, 2304, 9216, 26, 8, 4, 8192)
    | GEMMA
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8, 4, 131072)
    | GEMMA
    | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
    "glm": GLM,
    "glm4": GLM,
    "olmo2": OLMO,
    "olmo3": OLMO | {"rope_theta": 500000.0, "sliding_window": 4096},
    "exaone4": _sizes(102400, 4096, 16384, 32, 32, 32, 2048)
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
}
"""Defaults of config.json by model type, from transformers' configuration classes."""
SEEING_QWEN2 = {
    **_sizes(152064, 8192, 29568, 80, 64, 8, 32768),
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80},
}
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": SEEING_QWEN2,
    "qwen2_5_vl": SEEING_QWEN2,
    "qwen3_vl": {"max_position_embeddings": 128000, "rope_theta": 500000.0},
}
"""Language model defaults by wrapper, where they differ from those of the model type in `WRAPPERS`."""
NULLS = frozenset(
    ("head_dim", "num_key_value_heads", "sliding_window", "q_lora_rank", "n_shared_experts", "tie_word_embeddings")
    + ("attn_logit_softcapping", "final_logit_softcapping")
)
"""Fields for which null is a value. Any other field that is null counts as missing."""
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
NO_BIAS = ("qwen2", "qwen2_moe", "mistral", "ministral3", "mixtral", "phi3", "minimax_m2", "exaone4", "exaone_moe")
"""Model types that ignore `attention_bias`, as in transformers."""
MLP_BIAS = ("llama", "smollm3", "granite", "seed_oss", "ernie4_5", "deepseek_v2")
"""Model types that read `mlp_bias`, as in transformers."""
NO_OUTPUT_BIAS = ("qwen2", "glm", "glm4", "glm4_moe")
"""Model types whose `attention_bias` is of queries, keys and values alone."""
HEAD_NORMS = ("gemma3_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "exaone4", "exaone_moe", "dots1")
"""Model types that normalise each head of queries and keys."""
WIDE_NORMS = ("olmo2", "olmo3", "olmoe", "minimax_m2")
"""Model types that normalise the heads of queries, and those of keys, as one."""
TANH_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
"""Transformers' names of the same activation function."""
ACTIVATIONS = {"silu": "silu", "swish": "silu"} | dict.fromkeys(TANH_GELUS, "gelu_tanh")
