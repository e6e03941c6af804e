"""Mistral AI's Mistral, Mixtral, Ministral 3 and Mistral Small 4."""

from __future__ import annotations

from functools import partial
from typing import Any

from common.model_files.architecture import (
    ExpertStack,
    FieldReader,
    experts_in_all_layers,
    gguf_experts,
    grouped_experts,
)
from common.model_files.families.deepseek import LATENTS, ONE_GROUP
from common.model_files.families.family import ExpertFacts, Family, GGUFFacts, Windows, sizes

YARN = {
    **{"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "llama_4_scaling_beta": 0.1,
}
BLOCK_SPARSE = ExpertFacts(
    read=experts_in_all_layers,
    read_gguf=partial(gguf_experts, inner="feed_forward_length"),
    router="block_sparse_moe.gate",
    module="block_sparse_moe.experts",
    gates=("w1", "w3"),
    down="w2",
)


def _whole_rotated_part(fields: dict[str, Any], given: FieldReader) -> None:
    """Drop `partial_rotary_factor`: only `qk_rope_head_dim` determines the rotated part."""
    fields["rope_parameters"].pop("partial_rotary_factor", None)


FAMILIES = (
    Family(
        model_type="mistral",
        defaults=sizes(32000, 4096, 14336, 32, 32, 8, 131072) | {"sliding_window": 4096},
        wrappers={"mistral3": {}},
        qkv_bias=False,
        output_bias=False,
        windows=Windows(),
    ),
    Family(
        model_type="mixtral",
        defaults=sizes(32000, 4096, 14336, 32, 32, 8, 131072)
        | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2},
        qkv_bias=False,
        output_bias=False,
        windows=Windows(),
        experts=BLOCK_SPARSE,
        gguf=GGUFFacts(
            architecture="llama", applies=lambda reader: bool(reader.number("expert_count", 0)), interleaves=True
        ),
    ),
    Family(
        model_type="ministral3",
        defaults=sizes(131072, 4096, 14336, 34, 32, 8, 262144)
        | {
            **{"head_dim": 128, "rms_norm_eps": 1e-5},
            "rope_parameters": YARN | {"factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6},
        },
        qkv_bias=False,
        output_bias=False,
        windows=Windows(),
        gguf=GGUFFacts(architecture="mistral3", interleaves=True),
    ),
    Family(
        model_type="mistral4",
        defaults=sizes(131072, 4096, 12288, 36, 32, 32, 1048576)
        | LATENTS
        | ONE_GROUP
        | {
            **{"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "n_routed_experts": 128},
            **{"num_experts_per_tok": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 0},
            "rope_parameters": YARN | {"factor": 128.0, "original_max_position_embeddings": 8192},
        },
        complete=_whole_rotated_part,
        decoder="deepseek",
        experts=ExpertFacts(
            # Softmax scores, otherwise as in DeepSeek V3. Groups are refused: this family selects them differently.
            read=partial(grouped_experts, scoring=("softmax",), sigmoid=False, one_group=True),
            stack=ExpertStack("mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs_first=False),
        ),
        latents="by_field",
        mtp="unread",
    ),
)
