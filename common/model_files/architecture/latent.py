"""Multi-head latent attention, read from config.json or GGUF metadata. Does not load torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.model_files.architecture.fields import FieldReader

NORM_EPS = 1e-6
"""Epsilon of the norms of latents, independent of `rms_norm_eps`, as in DeepSeek's code and transformers."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention of DeepSeek V2 (arXiv 2405.04434, section 2.1): one latent per token for keys and values.

    A token's cache entry is its latent of `rank` numbers, followed by `rope_dim` rotated ones shared by all heads. A
    query head has `nope_dim` numbers that are multiplied by the latent, and `rope_dim` rotated ones. A value head has
    `value_dim` numbers. Queries are computed from latents of `query_rank` numbers, or from hidden states if it is 0.
    With `interleaved`, the file rotates element 2 i with element 2 i + 1.
    """

    query_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def key_dim(self) -> int:
        """Numbers that the cache stores per token and layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Size of a query head before its unrotated part is multiplied by the latents."""
        return self.nope_dim + self.rope_dim


def read_latent(reader: FieldReader, *, neighbours: bool) -> LatentConfig:
    """Read the latents of a model. `neighbours`: rotated pairs are neighbours regardless of `rope_interleave`.

    Raises ModelError if they are not supported.
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
    """Read the latents of architecture deepseek2.

    Files that store the key and value parts of a matrix separately have the head widths in fields with suffix `_mla`.
    """
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
    """Return the factor of scores: above 1 / sqrt(query_dim) if YaRN extends the context (`mscale_all_dim`)."""
    reader, scale = FieldReader(rope, path), 1.0 / math.sqrt(latent.query_dim)
    all_dim = reader.number("mscale_all_dim", 0.0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not all_dim:
        return scale
    factor = reader.positive("factor")
    return scale * (0.1 * all_dim * math.log(factor) + 1.0) ** 2 if factor > 1 else scale
