"""Checkpoints as their authors published them: fields of config.json that matter, and what is read from them.

The fields are quoted from the publishers' files on Hugging Face. Sizes are in the order of `sized`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.model_files import ModelConfig, ModelFiles, from_hf
from common.model_files.describe import describe_folder
from common.model_files.families import FAMILIES, WRAPPERS
from common.model_files.tiny import make_tiny_model

from .test_config import read, transformers_fields

Fields = dict[str, Any]


def sized(
    model_type: str,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    length: int,
    **more: Any,
) -> Fields:
    """Fields of a config.json: sizes of vocabulary, hidden states and MLP, numbers of layers and heads, context."""
    return {
        **{"model_type": model_type, "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner},
        **{"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
        **{"max_position_embeddings": length, "hidden_act": "silu", "tie_word_embeddings": False, **more},
    }


def experts(count: int, per_token: int, inner: int, **more: Any) -> Fields:
    """Experts of DeepSeek's variant."""
    return {"n_routed_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": inner, **more}


def scaling(factor: float, original: int, kind: str = "yarn", **more: Any) -> Fields:
    return {"factor": factor, "original_max_position_embeddings": original, "rope_type": kind, **more}


def old(scaled: Fields) -> Fields:
    """Return `rope_scaling` as transformers wrote it until 4.44."""
    return {("type" if name == "rope_type" else name): value for name, value in scaled.items()}


LLAMA3 = {"high_freq_factor": 4.0, "low_freq_factor": 1.0}
MSCALE = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
NO_WINDOW = {"sliding_window": None, "use_sliding_window": False}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "moe_layer_freq": 1}
V3 = sized(
    *("deepseek_v3", 129280, 7168, 18432, 61, 128, 128, 163840),
    **{**LATENT, **NOAUX, **experts(256, 8, 2048), "q_lora_rank": 1536, "n_group": 8, "topk_group": 4},
    **{"n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6},
    **{"rope_theta": 10000, "rope_scaling": old(scaling(40, 4096, **MSCALE)), "num_nextn_predict_layers": 1},
)
KIMI = V3 | {
    **{"model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64},
    **{"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_theta": 50000.0},
    **{"routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "max_position_embeddings": 262144},
    "rope_scaling": old(scaling(64.0, 4096, **MSCALE)),
}
QWEN25 = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "use_sliding_window": False, "max_window_layers": 28}
QWEN3 = {"head_dim": 128, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "attention_bias": False, **NO_WINDOW}
QWEN3_MOE = {**experts(0, 8, 768), "num_experts": 128, "norm_topk_prob": True, "mlp_only_layers": []}
GEMMA3 = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
THREE_OF_FOUR = [*["sliding_attention"] * 3, "full_attention"]
DEVSTRAL = sized(
    *("ministral3", 131072, 5120, 32768, 40, 32, 8, 393216),
    **{"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None},
    rope_parameters=scaling(48.0, 8192, **MSCALE, llama_4_scaling_beta=0.1, rope_theta=1e8, type="yarn"),
)
EXAONE4 = sized(
    *("exaone4", 102400, 5120, 27392, 64, 40, 8, 131072),
    **{"head_dim": 128, "rope_theta": 1000000, "rope_scaling": scaling(16.0, 8192, "llama3", **LLAMA3)},
    **{"sliding_window": 4096, "sliding_window_pattern": "LLLG", "rms_norm_eps": 1e-5},
)
K_EXAONE = sized(
    *("exaone_moe", 153600, 6144, 18432, 48, 64, 8, 262144),
    **{"head_dim": 128, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": 128, **NOAUX},
    **{"sliding_window_pattern": "LLLG", "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1},
    **{"moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
    **{"first_last_k_dense_replace": 1, "is_moe_layer": [False, *[True] * 47], "rms_norm_eps": 1e-5},
)
GPT_OSS = sized(
    *("gpt_oss", 201088, 2880, 2880, 24, 64, 8, 131072),
    **{"head_dim": 64, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12},
    **{"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0},
    **{"rope_theta": 150000, "rope_scaling": scaling(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)},
    **{"attention_bias": True, "initial_context_length": 4096, "rms_norm_eps": 1e-5},
)

PUBLISHED: Mapping[str, tuple[Fields, str]] = {
    "Llama-2-7b": (
        sized("llama", 32000, 4096, 11008, 32, 32, 32, 4096, rope_scaling=None, pretraining_tp=1, rms_norm_eps=1e-5),
        "32/32x128, 4096, none 10000",
    ),
    "Llama-3.1-8B": (
        sized("llama", 128256, 4096, 14336, 32, 32, 8, 131072, rope_theta=500000.0, mlp_bias=False)
        | {"rope_scaling": scaling(8.0, 8192, "llama3", **LLAMA3), "rms_norm_eps": 1e-5},
        "32/8x128, 131072, llama3 x8 500000",
    ),
    "Llama-3.2-1B": (
        sized("llama", 128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, rope_theta=500000.0)
        | {"rope_scaling": scaling(32.0, 8192, "llama3", **LLAMA3), "tie_word_embeddings": True},
        "32/8x64, 131072, llama3 x32 500000, tied",
    ),
    "SmolLM2-135M": (
        sized("llama", 49152, 576, 1536, 30, 9, 3, 8192, rope_theta=100000, tie_word_embeddings=True)
        | {"rope_interleaved": False, "rope_scaling": None, "is_llama_config": True, "rms_norm_eps": 1e-5},
        "9/3x64, 8192, none 100000, tied",
    ),
    "Mistral-7B-v0.1": (
        sized("mistral", 32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096, rope_theta=10000.0),
        "32/8x128, 32768, none 10000, 32 windows of 4096",
    ),
    "Mistral-7B-Instruct-v0.3": (
        sized("mistral", 32768, 4096, 14336, 32, 32, 8, 32768, sliding_window=None, rope_theta=1000000.0),
        "32/8x128, 32768, none 1e+06",
    ),
    "Mistral-Small-3.1-24B": (
        {"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}}
        | {
            "text_config": sized("mistral", 131072, 5120, 32768, 40, 32, 8, 131072, head_dim=128)
            | {"rope_theta": 1000000000.0, "sliding_window": None}
        },
        "32/8x128, 131072, none 1e+09",
    ),
    "Devstral-Small-2-24B": (
        {"model_type": "mistral3", "tie_word_embeddings": False, "text_config": DEVSTRAL},
        "32/8x128, 393216, yarn x48 1e+08",
    ),
    "Qwen2.5-7B-Instruct": (
        sized("qwen2", 152064, 3584, 18944, 28, 28, 4, 32768, sliding_window=131072, **QWEN25),
        "28/4x128, 32768, none 1e+06",
    ),
    "Qwen2.5-VL-7B-Instruct": (
        sized("qwen2_5_vl", 152064, 3584, 18944, 28, 28, 4, 128000, sliding_window=32768, **QWEN25)
        | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"depth": 32}},
        "28/4x128, 128000, none 1e+06",
    ),
    "Qwen2-VL-7B-Instruct": (
        sized("qwen2_vl", 152064, 3584, 18944, 28, 28, 4, 32768, sliding_window=32768, **QWEN25)
        | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"depth": 32}},
        "28/4x128, 32768, none 1e+06",
    ),
    "Qwen3-8B": (
        sized("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, max_window_layers=36, **QWEN3),
        "32/8x128, 40960, none 1e+06",
    ),
    "Qwen3-VL-4B-Instruct": (
        {"model_type": "qwen3_vl", "tie_word_embeddings": True, "vision_config": {"model_type": "qwen3_vl"}}
        | {
            "text_config": sized("qwen3_vl_text", 151936, 2560, 9728, 36, 32, 8, 262144, head_dim=128)
            | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
            | {"rope_theta": 5000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
        },
        "32/8x128, 262144, none 5e+06, tied",
    ),
    "InternVL3-8B": (
        {"model_type": "internvl", "vision_config": {"model_type": "internvl_vision"}}
        | {"text_config": sized("qwen2", 151674, 3584, 18944, 28, 28, 4, 32768, sliding_window=None, **QWEN25)},
        "28/4x128, 32768, none 1e+06",
    ),
    "gemma-2-9b-it": (
        sized("gemma2", 256000, 3584, 14336, 42, 16, 8, 8192, head_dim=256, query_pre_attn_scalar=256)
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        "16/8x256, 8192, none 10000, 21 windows of 4096, tied",
    ),
    "gemma-3-1b-it": (
        sized("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 32768, head_dim=256, query_pre_attn_scalar=256)
        | {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512}
        | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": 6, "tie_word_embeddings": True},
        "4/1x256, 32768, none 10000, none 1e+06, 22 windows of 512, tied",
    ),
    "gemma-3-4b-it": (
        {"model_type": "gemma3", "mm_tokens_per_image": 256}
        | {
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
            | {"num_hidden_layers": 34, **GEMMA3}
        },
        "8/4x256, 131072, none 10000, linear x8 1e+06, 29 windows of 1024, tied",
    ),
    "Phi-3-mini-128k": (
        sized("phi3", 32064, 3072, 8192, 32, 32, 32, 131072, original_max_position_embeddings=4096, rms_norm_eps=1e-5)
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.3] * 48}}
        | {"rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False},
        "32/32x96, 131072, longrope 10000, 32 windows of 262144",
    ),
    "phi-4": (
        sized("phi3", 100352, 5120, 17920, 40, 40, 10, 16384, original_max_position_embeddings=16384)
        | {"rope_scaling": None, "rope_theta": 250000.0, "sliding_window": None, "rms_norm_eps": 1e-5},
        "40/10x128, 16384, none 250000",
    ),
    "Phi-4-mini-instruct": (
        sized("phi3", 200064, 3072, 8192, 32, 24, 8, 131072, original_max_position_embeddings=4096)
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.1] * 48}}
        | {"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True},
        "24/8x128, 131072, longrope 10000 of 96, 32 windows of 262144, tied",
    ),
    "Mixtral-8x7B": (
        sized("mixtral", 32000, 4096, 14336, 32, 32, 8, 32768, num_local_experts=8, num_experts_per_tok=2)
        | {"rope_theta": 1000000.0, "sliding_window": None, "router_aux_loss_coef": 0.02, "rms_norm_eps": 1e-5},
        "32/8x128, 32768, none 1e+06, experts 2/8x14336+0",
    ),
    "Qwen1.5-MoE-A2.7B": (
        sized("qwen2_moe", 151936, 2048, 5632, 24, 16, 16, 32768, sliding_window=32768, use_sliding_window=False)
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "max_window_layers": 21},
        "16/16x128, 32768, none 10000, experts 4/60x1408+5632",
    ),
    "Qwen3-30B-A3B": (
        sized("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 40960, decoder_sparse_step=1, **QWEN3, **QWEN3_MOE),
        "32/4x128, 40960, none 1e+06, experts 8/128x768+0",
    ),
    "Qwen3-VL-30B-A3B": (
        {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_vl_moe"}}
        | {
            "text_config": sized("qwen3_vl_moe_text", 151936, 2048, 6144, 48, 32, 4, 262144, head_dim=128, **QWEN3_MOE)
            | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
            | {"rope_theta": 5000000, "decoder_sparse_step": 1}
        },
        "32/4x128, 262144, none 5e+06, experts 8/128x768+0",
    ),
    "gpt-oss-20b": (
        GPT_OSS,
        "64/8x64, 131072, yarn x32 150000, 12 windows of 128, experts 4/32x2880+0",
    ),
    "SmolLM3-3B": (
        sized("smollm3", 128256, 2048, 11008, 36, 16, 4, 65536, rope_theta=5000000.0, rope_scaling=None)
        | {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "tie_word_embeddings": True, **NO_WINDOW},
        "16/4x128, 65536, none 5e+06, 9 unrotated, tied",
    ),
    "granite-3.3-8b-instruct": (
        sized("granite", 49159, 4096, 12800, 40, 32, 8, 131072, rope_theta=10000000.0, rms_norm_eps=1e-5)
        | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125}
        | {"logits_scaling": 16.0, "tie_word_embeddings": True},
        "32/8x128, 131072, none 1e+07, tied",
    ),
    "granite-3.1-3b-a800m": (
        sized("granitemoe", 49155, 1536, 512, 32, 24, 8, 131072, num_local_experts=40, num_experts_per_tok=8)
        | {"rope_theta": 10000000.0, "tie_word_embeddings": True},
        "24/8x64, 131072, none 1e+07, experts 8/40x512+0, tied",
    ),
    "Seed-OSS-36B": (
        sized("seed_oss", 155136, 5120, 27648, 64, 80, 8, 524288, head_dim=128, rope_theta=10000000.0)
        | {"rope_scaling": {"rope_type": "default"}, "attention_bias": True, "attention_out_bias": False},
        "80/8x128, 524288, none 1e+07",
    ),
    "ERNIE-4.5-0.3B": (
        sized("ernie4_5", 103424, 1024, 3072, 18, 16, 2, 131072, head_dim=128, use_bias=False, rope_theta=500000.0)
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        "16/2x128, 131072, none 500000, tied",
    ),
    "ERNIE-4.5-21B-A3B": (
        sized("ernie4_5_moe", 103424, 2560, 12288, 28, 20, 4, 131072, use_bias=False, rope_theta=500000)
        | {"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "moe_intermediate_size": 1536}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_capacity": [64] * 3}
        | {"tie_word_embeddings": True, "head_dim": None, "moe_gate_act": None, "moe_use_aux_free": True},
        "20/4x128, 131072, none 500000, experts 6/64x1536+3072, 1 dense, tied",
    ),
    "glm-4-9b-chat": (
        sized("glm", 151552, 4096, 13696, 40, 32, 2, 131072, head_dim=128, attention_bias=True, rope_theta=10000.0)
        | {"rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5},
        "32/2x128, 131072, none 10000 of 64",
    ),
    "GLM-4-32B-0414": (
        sized("glm4", 151552, 6144, 23040, 61, 48, 2, 32768, head_dim=128, attention_bias=False, rope_theta=10000.0)
        | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        "48/2x128, 32768, none 10000 of 64",
    ),
    "GLM-4.7": (
        sized("glm4_moe", 151552, 5120, 12288, 92, 96, 8, 202752, head_dim=128, attention_bias=True, use_qk_norm=True)
        | experts(160, 8, 1536, n_shared_experts=1, first_k_dense_replace=3, routed_scaling_factor=2.5)
        | {"partial_rotary_factor": 0.5, "rope_theta": 1000000, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
        | {"num_nextn_predict_layers": 1},
        "96/8x128, 202752, none 1e+06 of 64, experts 8/160x1536+1536, 3 dense, scale 2.5, 1 for drafts",
    ),
    "GLM-4.7-Flash": (
        sized("glm4_moe_lite", 154880, 2048, 10240, 47, 20, 20, 202752, q_lora_rank=768, kv_lora_rank=512)
        | {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "partial_rotary_factor": 1.0}
        | experts(64, 4, 1536, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.8)
        | {"rope_theta": 1000000.0, "rope_scaling": None, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc"},
        "20/1x576, 202752, none 1e+06, experts 4/64x1536+1536, 1 dense, scale 1.8",
    ),
    "dots.llm1.inst": (
        sized("dots1", 152064, 4096, 10944, 62, 32, 32, 32768, rope_theta=10000000, scoring_func="noaux_tc")
        | experts(128, 6, 1408, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5)
        | {"n_group": None, "topk_group": None, "norm_topk_prob": True, "max_window_layers": 62, **NO_WINDOW},
        "32/32x128, 32768, none 1e+07, experts 6/128x1408+2816, 1 dense, scale 2.5",
    ),
    "Solar-Open-100B": (
        sized("solar_open", 196608, 4096, 10240, 48, 64, 8, 131072, head_dim=128, rope_theta=1000000)
        | experts(128, 8, 1280, n_shared_experts=1, first_k_dense_replace=0, routed_scaling_factor=1.0)
        | {"partial_rotary_factor": 1.0, "norm_topk_prob": True, "rope_scaling": old(scaling(2.0, 65536))},
        "64/8x128, 131072, yarn x2 1e+06, experts 8/128x1280+1280",
    ),
    "K-EXAONE-236B-A23B": (
        K_EXAONE | {"layer_types": THREE_OF_FOUR * 12},
        "64/8x128, 262144, none 1e+06, 12 unrotated, 36 windows of 128, experts 8/128x2048+2048, 1 dense, scale 2.5",
    ),
    "OLMoE-1B-7B-0125": (
        sized("olmoe", 50304, 2048, 1024, 16, 16, 16, 4096, num_experts=64, num_experts_per_tok=8)
        | {"norm_topk_prob": False, "clip_qkv": None, "rope_theta": 10000.0, "rms_norm_eps": 1e-5},
        "16/16x128, 4096, none 10000, experts 8/64x1024+0",
    ),
    "MiniMax-M2": (
        sized("minimax_m2", 200064, 3072, 1536, 62, 48, 8, 196608, head_dim=128, rotary_dim=64, rope_theta=5000000)
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True}
        | {"attn_type_list": [1] * 62, "use_qk_norm": True, "qk_norm_type": "per_layer", "num_mtp_modules": 3},
        "48/8x128, 196608, none 5e+06 of 64, experts 8/256x1536+0",
    ),
    "OLMo-2-1124-7B": (
        sized("olmo2", 100352, 4096, 11008, 32, 32, 32, 4096, rope_theta=500000, rope_scaling=None, rms_norm_eps=1e-6),
        "32/32x128, 4096, none 500000",
    ),
    "Olmo-3.1-32B-Instruct": (
        sized("olmo3", 100278, 5120, 27648, 64, 40, 8, 65536, rope_theta=500000, sliding_window=4096)
        | {"layer_types": THREE_OF_FOUR * 16, "rms_norm_eps": 1e-6}
        | {"rope_scaling": scaling(8.0, 8192, beta_fast=32, beta_slow=1, attention_factor=1.2079441541679836)},
        "40/8x128, 65536, none 500000, yarn x8 500000, 48 windows of 4096",
    ),
    "EXAONE-4.0-32B": (
        EXAONE4 | {"layer_types": THREE_OF_FOUR * 16},
        "40/8x128, 131072, llama3 x16 1e+06, 16 unrotated, 48 windows of 4096",
    ),
    "EXAONE-4.0-1.2B": (
        sized("exaone4", 102400, 2048, 4096, 30, 32, 8, 65536, head_dim=64, rope_theta=1000000)
        | {"layer_types": ["full_attention"] * 30, "sliding_window": None, "sliding_window_pattern": None}
        | {"rope_scaling": scaling(16.0, 8192, "llama3", **LLAMA3), "tie_word_embeddings": True},
        "32/8x64, 65536, llama3 x16 1e+06, tied",
    ),
    "DeepSeek-V2-Lite": (
        sized("deepseek_v2", 102400, 2048, 10944, 27, 16, 16, 163840, q_lora_rank=None, rope_theta=10000, **LATENT)
        | experts(64, 6, 1408, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=1.0)
        | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "scoring_func": "softmax"}
        | {"rope_scaling": old(scaling(40, 4096, **MSCALE | {"mscale": 0.707, "mscale_all_dim": 0.707}))},
        "16/1x576, 163840, yarn x40 10000, experts 6/64x1408+2816, 1 dense",
    ),
    "DeepSeek-V3": (
        V3,
        "128/1x576, 163840, yarn x40 10000, experts 8/256x2048+2048, 3 dense, 4/8 groups, scale 2.5, 1 for drafts",
    ),
    "Kimi-K2-Thinking": (
        KIMI,
        "64/1x576, 262144, yarn x64 50000, experts 8/384x2048+2048, 1 dense, scale 2.827",
    ),
    "Kimi-K2.5": (
        {"model_type": "kimi_k25", "eos_token_id": 163585, "text_config": KIMI},
        "64/1x576, 262144, yarn x64 50000, experts 8/384x2048+2048, 1 dense, scale 2.827",
    ),
    "Mistral-Small-4": (
        {"model_type": "mistral3", "tie_word_embeddings": False}
        | {
            "text_config": sized("mistral4", 131072, 4096, 12288, 36, 32, 32, 1048576, q_lora_rank=1024)
            | {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 128}
            | experts(128, 4, 2048, n_shared_experts=1, first_k_dense_replace=0, routed_scaling_factor=1.0)
            | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "rope_interleave": True}
            | {"rope_parameters": scaling(128.0, 8192, **MSCALE, llama_4_scaling_beta=0.1, rope_theta=10000.0)}
        },
        "32/1x320, 1048576, yarn x128 10000, experts 4/128x2048+2048",
    ),
}


def summary(config: ModelConfig) -> str:
    """Heads/KV heads x size, context, rotary embeddings, and what else differs from the plainest model, in one line."""
    found = [f"{config.num_heads}/{config.num_kv_heads}x{config.head_dim}", str(config.max_model_len)]
    for rope in dict.fromkeys(rope for rope in config.layer_ropes if rope.scaling != "off"):
        factor = f" x{rope.factor:g}" if rope.factor != 1 else ""
        found.append(f"{rope.scaling}{factor} {rope.theta:g}" + (f" of {rope.rotary_dim}" if rope.rotary_dim else ""))
    unrotated = [rope for rope in config.layer_ropes if rope.scaling == "off"]
    found += [f"{len(unrotated)} unrotated"] if unrotated else []
    if slides := [window for window in config.layer_windows if window]:
        found.append(f"{len(slides)} windows of {slides[0]}")
    if (one := config.experts) is not None:
        dense = one.layers.count(False)
        found.append(f"experts {one.per_token}/{one.count}x{one.intermediate_size}+{one.shared_size}")
        found += [f"{dense} dense"] if dense else []
        found += [f"{one.kept_groups}/{one.groups} groups"] if one.groups > 1 else []
        found += [f"scale {one.scale:g}"] if one.scale != 1 else []
    found += ["tied" if config.tie_embeddings else "head if present"] if config.tie_embeddings is not False else []
    found += [f"{config.extra_layers} for drafts"] if config.extra_layers else []
    return ", ".join(found)


def written(folder: Path, fields: Fields, **files: Any) -> Path:
    """A folder with config.json, and other files of JSON by their names without suffix."""
    for name, content in {"config": fields, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "config.json"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration(tmp_path: Path, name: str) -> None:
    fields, expected = PUBLISHED[name]
    assert summary(from_hf(written(tmp_path, fields))) == expected


def test_there_is_a_published_configuration_of_each_model_type() -> None:
    texts = [fields.get("text_config", fields) for fields, _ in PUBLISHED.values()]
    assert {fields["model_type"] for fields, _ in PUBLISHED.values()} | {text["model_type"] for text in texts} >= {
        *FAMILIES,
        *WRAPPERS,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_reads_the_same(tmp_path: Path, name: str) -> None:
    fields, _ = PUBLISHED[name]
    path, whole = tmp_path / "config.json", transformers_fields(fields)
    if fields["model_type"] in WRAPPERS:
        given = fields.get("text_config", {}).get("model_type")
        whole = {**fields, "text_config": whole | ({"model_type": given} if given in FAMILIES else {})}
    assert read(fields, path) == read(whole, path)


def test_exaone_describes_its_layers_with_letters(tmp_path: Path) -> None:
    """L: local, with a window; G: global. `is_moe_layer` lists the layers with experts."""
    by_letters, by_names = (from_hf(written(tmp_path, one)) for one in (EXAONE4, PUBLISHED["EXAONE-4.0-32B"][0]))
    assert by_letters == by_names
    sparse = [i % 2 == 1 for i in range(48)]
    found = from_hf(written(tmp_path, K_EXAONE | {"is_moe_layer": sparse})).experts
    assert found is not None and list(found.layers) == sparse


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sliding_window_pattern": "LLXG"},
            "sliding_window_pattern 'LLXG' is not supported: use a model with.*L and G",
        ),
        ({"sliding_window_pattern": ""}, "sliding_window_pattern '' is not supported"),
        ({"is_moe_layer": [True] * 3}, "is_moe_layer of 3 layers is not supported: .* one of 48"),
        ({"is_moe_layer": "all"}, "is_moe_layer 'all' is not supported"),
    ],
)
def test_layers_of_exaone_that_nothing_means(tmp_path: Path, change: Fields, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(written(tmp_path, K_EXAONE | change))


def test_windows_of_a_family_without_windows_are_refused(tmp_path: Path) -> None:
    fields, _ = PUBLISHED["Llama-3.1-8B"]
    windows = {"sliding_window": 4096, "layer_types": ["sliding_attention"] * 32}
    with pytest.raises(ModelError, match="layer_types sliding_attention of llama is not supported"):
        from_hf(written(tmp_path, fields | windows))
    assert not any(from_hf(written(tmp_path, fields | {"layer_types": ["full_attention"] * 32})).layer_windows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("published") / "model")


def described(folder: Path, name: str, top: Fields, **files: Any) -> ModelFiles:
    others = {"generation_config": {}, "tokenizer_config": {}, "special_tokens_map": {}}
    written(folder, PUBLISHED[name][0] | top, **others | files)
    return describe_folder(folder, name, progress=False, weights=False)


@pytest.mark.parametrize(
    ("name", "top", "generation", "expected"),
    [
        ("Llama-3.1-8B", {"eos_token_id": [128001, 128008, 128009]}, {}, (128001, 128008, 128009)),
        (
            "Llama-3.1-8B",
            {"eos_token_id": 128001},
            {"eos_token_id": [128001, 128008, 128009]},
            (128001, 128008, 128009),
        ),
        ("Qwen3-8B", {"eos_token_id": 151645}, {"eos_token_id": [151645, 151643]}, (151645, 151643)),
        ("gpt-oss-20b", {"eos_token_id": 200002}, {"eos_token_id": [200002, 199999, 200012]}, (200002, 199999, 200012)),
        ("gemma-3-4b-it", {"eos_token_id": [1, 106]}, {"cache_implementation": "hybrid"}, (1, 106)),
        ("Solar-Open-100B", {"eos_token_id": 2}, {"eos_token_id": [2, 24, 25]}, (2, 24, 25)),
        ("EXAONE-4.0-32B", {"eos_token_id": 361}, {"eos_token_id": None}, (361,)),
        ("Kimi-K2.5", {"eos_token_id": None, "text_config": KIMI | {"eos_token_id": 163585}}, {}, (163585,)),
        (
            "Kimi-K2.5",
            {"eos_token_id": [163585, 163586], "text_config": KIMI | {"eos_token_id": 2}},
            {},
            (163585, 163586),
        ),
    ],
)
def test_published_end_tokens(
    folder: Path, name: str, top: Fields, generation: Fields, expected: tuple[int, ...]
) -> None:
    assert described(folder, name, top, generation_config=generation).eos_token_ids == expected


def added(content: str) -> Fields:
    """A special token as an object."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


@pytest.mark.parametrize(
    ("tokenizer", "special", "expected"),
    [
        ({"bos_token": added("<s>"), "eos_token": added("</s>"), "added_tokens_decoder": {}}, {}, ("<s>", "</s>")),
        (
            {"bos_token": None, "eos_token": "<|im_end|>", "added_tokens_decoder": {"151645": {}}},
            {"bos_token": "<s>", "eos_token": added("<|endoftext|>")},
            ("", "<|im_end|>"),
        ),
        ({"added_tokens_decoder": {}}, {"bos_token": "<s>", "eos_token": "</s>"}, ("<s>", "</s>")),
        ({"eos_token": "</s>"}, {"bos_token": added("<s>"), "eos_token": added("<|end|>")}, ("<s>", "<|end|>")),
        ({"eos_token": "</s>"}, {"bos_token": None, "eos_token": None}, ("", "</s>")),
    ],
)
def test_published_special_tokens(folder: Path, tokenizer: Fields, special: Fields, expected: tuple[str, str]) -> None:
    """special_tokens_map.json adds to tokenizer_config.json, and overrules older ones, without added_tokens_decoder."""
    files = described(folder, "Llama-2-7b", {}, tokenizer_config=tokenizer, special_tokens_map=special)
    assert (files.bos_token, files.eos_token) == expected


def test_a_router_refuses_what_a_worker_cannot_load(folder: Path) -> None:
    config = {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}, "eos_token_id": 151645}
    with pytest.raises(ModelError, match="quant_method is 'bitsandbytes'"):
        described(folder, "Qwen3-8B", config)
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "eos_token_id": 151645}
    assert described(folder, "Qwen3-8B", fp8).eos_token_ids == (151645,)
