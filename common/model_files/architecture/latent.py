"""Multi-head latent attention, as config.json describes it. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.model_files.architecture.fields import FieldReader

NORM_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says: DeepSeek's code and transformers' have it fixed."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """DeepSeek V2 (arXiv 2405.04434, section 2.1): keys and values of all heads are made of one latent a token.

    A token's latent has `rank` numbers, beside which lie `rope_dim` rotated ones that all heads share: those are what
    the cache holds. A query head has `nope_dim` numbers that meet the latent and `rope_dim` rotated ones. A head's
    value has `value_dim` numbers. Queries are made of latents of `query_rank` numbers; 0: of hidden states.
    `interleaved`: the file rotates neighbours, element 2 i with element 2 i + 1.
    """

    query_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def key_dim(self) -> int:
        """Numbers that the cache holds of a token and layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a query head before its part without rotation meets the latents."""
        return self.nope_dim + self.rope_dim


def read_latent(reader: FieldReader, *, neighbours: bool) -> LatentConfig:
    """The latents of a model, whose rotated parts are `neighbours` whatever `rope_interleave` says.

    ModelError if they are not supported.
    """
    heads = reader.count("num_attention_heads")
    if (kv_heads := reader.count("num_key_value_heads", heads)) != heads:
        raise reader.refuse(
            f"num_key_value_heads {kv_heads} of {heads} heads with latents", f"num_key_value_heads {heads}"
        )
    rope_dim = reader.count("qk_rope_head_dim")
    if rope_dim % 2:
        raise reader.refuse(f"qk_rope_head_dim {rope_dim}", "an even qk_rope_head_dim")
    if (share := reader.number("partial_rotary_factor", 1.0)) != 1.0:
        raise reader.refuse(
            f"partial_rotary_factor {share:g} of {reader.fields['model_type']}", "partial_rotary_factor 1"
        )
    return LatentConfig(
        query_rank=reader.whole("q_lora_rank"),
        rank=reader.count("kv_lora_rank"),
        nope_dim=reader.count("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=reader.count("v_head_dim"),
        interleaved=neighbours or reader.flag("rope_interleave"),
    )


def read_gguf_latent(reader: FieldReader) -> LatentConfig:
    """The latents of a deepseek2. Files that hold keys' and values' parts of a matrix apart say the widths of heads
    under names of their own; older ones under the usual names."""
    rope_dim = reader.count("rope.dimension_count")
    apart = "_mla" if f"{reader.prefix}attention.key_length_mla" in reader.fields else ""
    return LatentConfig(
        query_rank=int(reader.number("attention.q_lora_rank", 0)),
        rank=reader.count("attention.kv_lora_rank"),
        nope_dim=reader.count(f"attention.key_length{apart}") - rope_dim,
        rope_dim=rope_dim,
        value_dim=reader.count(f"attention.value_length{apart}"),
        interleaved=True,
    )


def latent_scale(latent: LatentConfig, rope: Mapping[str, Any], path: Path) -> float:
    """What multiplies scores: more than 1 / sqrt(query_dim) where YaRN stretches the context (`mscale_all_dim`)."""
    reader, scale = FieldReader(rope, path), 1.0 / math.sqrt(latent.query_dim)
    all_dim = reader.number("mscale_all_dim", 0.0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not all_dim:
        return scale
    factor = reader.positive("factor")
    return scale * (0.1 * all_dim * math.log(factor) + 1.0) ** 2 if factor > 1 else scale
