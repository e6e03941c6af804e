"""Alibaba's Qwen 2, 2.5 and 3, their mixtures of experts, and the language models of multimodal ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from common.model_files.architecture import ExpertsConfig, ExpertStack, FieldReader, count_experts, gguf_experts
from common.model_files.families.family import ExpertFacts, Family, GGUFFacts, Windows, sizes

WINDOW_IF_ASKED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
MOE = WINDOW_IF_ASKED | {"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False}
SEEING_QWEN2 = {
    **sizes(152064, 8192, 29568, 80, 64, 8, 32768),
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80},
}


def _experts(reader: FieldReader, num_layers: int, *, shared: bool = False) -> ExpertsConfig:
    """Read experts in the layers that `decoder_sparse_step` and `mlp_only_layers` select."""
    dense, step = reader.fields["mlp_only_layers"], reader.count("decoder_sparse_step")
    if not isinstance(dense, list | tuple):
        raise reader.wrong("mlp_only_layers", dense, "a list of layers")
    inner, normalised = reader.count("moe_intermediate_size"), reader.flag("norm_topk_prob")
    return ExpertsConfig(
        *count_experts(reader),
        inner,
        tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        normalised,
        shared_size=reader.count("shared_expert_intermediate_size") if shared else 0,
    )


def _gguf_shared(reader: FieldReader, num_layers: int) -> ExpertsConfig | None:
    """Read experts with a shared one. Files of 2024 omit its width."""
    found = gguf_experts(reader, num_layers, normalised=False)
    if found is None:
        return None
    shared = reader.count("expert_shared_feed_forward_length", reader.count("feed_forward_length"))
    return replace(found, shared_size=shared)


FAMILIES = (
    Family(
        model_type="qwen2",
        defaults=sizes(151936, 4096, 22016, 32, 32, 32, 32768) | WINDOW_IF_ASKED,
        wrappers={"qwen2_vl": SEEING_QWEN2, "qwen2_5_vl": SEEING_QWEN2, "internvl": {}},
        qkv_bias=True,
        output_bias=False,
        windows=Windows(asked_for=True, slides=lambda layer, first: layer >= first),
        gguf=GGUFFacts(architecture="qwen2"),
    ),
    Family(
        model_type="qwen3",
        defaults=sizes(151936, 4096, 22016, 32, 32, 32, 32768) | WINDOW_IF_ASKED | {"head_dim": 128},
        wrappers={"qwen3_vl": {"max_position_embeddings": 128000, "rope_theta": 500000.0}},
        qk_norm="head",
        windows=Windows(asked_for=True, slides=lambda layer, first: layer >= first),
        gguf=GGUFFacts(architecture="qwen3"),
    ),
    Family(
        model_type="qwen2_moe",
        defaults=sizes(151936, 2048, 5632, 24, 16, 16, 32768)
        | MOE
        | {
            **{"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias="qkv_bias",
        output_bias=False,
        windows=Windows(asked_for=True, slides=lambda layer, first: not (layer % 2 or layer >= first)),
        experts=ExpertFacts(read=partial(_experts, shared=True), read_gguf=_gguf_shared),
        gguf=GGUFFacts(architecture="qwen2moe"),
    ),
    Family(
        model_type="qwen3_moe",
        defaults=sizes(151936, 2048, 6144, 24, 32, 4, 32768)
        | MOE
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        qk_norm="head",
        windows=Windows(asked_for=True),
        experts=ExpertFacts(read=_experts),
        gguf=GGUFFacts(architecture="qwen3moe"),
    ),
    Family(
        model_type="qwen3_vl_moe_text",
        defaults=sizes(151936, 2048, 5632, 24, 16, 16, 128000)
        | MOE
        | {
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": True},
            **{"tie_word_embeddings": True, "rope_theta": 500000.0},
        },
        wrappers={"qwen3_vl_moe": {}},
        qk_norm="head",
        experts=ExpertFacts(
            read=_experts,
            stack=ExpertStack("mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs_first=True),
        ),
    ),
)
