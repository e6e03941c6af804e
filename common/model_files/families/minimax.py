"""MiniMax-M2: experts with corrected sigmoid scores, and one norm over all heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from common.model_files.architecture import FieldReader, experts_in_all_layers, gguf_experts
from common.model_files.families.family import Family, GGUFFacts, sizes
from common.model_files.families.mistral import BLOCK_SPARSE


def _rotated_share(fields: dict[str, Any], given: FieldReader) -> None:
    """Set `partial_rotary_factor` from `rotary_dim`."""
    if "rotary_dim" in given.fields:
        share = given.positive("rotary_dim") / FieldReader(fields, given.path).positive("head_dim", 128)
        fields.setdefault("partial_rotary_factor", share)


FAMILIES = (
    Family(
        model_type="minimax_m2",
        defaults=sizes(200064, 3072, 1536, 62, 48, 8, 196608)
        | {"head_dim": 128, "rope_theta": 5e6, "num_experts": 256, "num_experts_per_tok": 8},
        complete=_rotated_share,
        qk_norm="heads",
        qkv_bias=False,
        output_bias=False,
        experts=replace(
            BLOCK_SPARSE,
            read=partial(experts_in_all_layers, corrected=True),
            read_gguf=partial(gguf_experts, corrected=True),
            correction="block_sparse_moe",
        ),
        gguf=GGUFFacts(architecture="minimax-m2"),
    ),
)
