"""Baidu's ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from common.model_files.architecture import (
    ExpertsConfig,
    FieldReader,
    check_groups,
    expect,
    gguf_grouped_experts,
)
from common.model_files.families.family import ExpertFacts, Family, GGUFFacts, sizes


def _experts(reader: FieldReader, num_layers: int) -> ExpertsConfig:
    """Read experts selected by corrected softmax scores, in a range of layers."""
    expect(reader, "use_bias", reader.fields.get("use_bias"), None, False)
    first, step = reader.whole("moe_layer_start_index"), reader.count("moe_layer_interval")
    last = int(reader.number("moe_layer_end_index"))
    last = num_layers - 1 if last == -1 else last
    count, per_token = reader.count("num_experts"), reader.count("num_experts_per_tok")
    check_groups(reader, count, per_token, 1, 1, at_least=1)
    inner = reader.count("moe_intermediate_size")
    return ExpertsConfig(
        *(count, per_token, inner),
        tuple(first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)),
        normalised=True,
        shared_size=reader.whole("moe_num_shared_experts") * inner,
        shared_gated=False,
        corrected=True,
    )


def _gguf_experts(reader: FieldReader, num_layers: int) -> ExpertsConfig | None:
    found = gguf_grouped_experts(reader, num_layers, sigmoid=False)
    if found is None:
        return None
    step = reader.count("interleave_moe_layer_step", 1)
    layers = tuple(sparse and (i + 1) % step == 0 for i, sparse in enumerate(found.layers))
    return replace(found, layers=layers, normalised=True, corrected=True)


FAMILIES = (
    Family(
        model_type="ernie4_5",
        defaults=sizes(103424, 1024, 3072, 18, 16, 2, 131072)
        | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        renamed=(("use_bias", "attention_bias"), ("use_bias", "mlp_bias")),
        neighbours=True,
        gguf=GGUFFacts(architecture="ernie4_5"),
    ),
    Family(
        model_type="ernie4_5_moe",
        defaults=sizes(103424, 2560, 12288, 28, 20, 4, 131072)
        | {
            **{"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False},
            **{"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1536},
            **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1},
            "moe_layer_interval": 1,
        },
        renamed=(("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok")),
        neighbours=True,
        experts=ExpertFacts(read=_experts, read_gguf=_gguf_experts, correction="mlp.moe_statics"),
        gguf=GGUFFacts(architecture="ernie4_5-moe"),
    ),
)
