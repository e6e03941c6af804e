"""A mixture of experts, as config.json describes it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.model_config.fields import FieldReader

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of gpt-oss' gate, which the kernels have as "clamped_swiglu"."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The layers that have experts in place of one MLP.

    A router gives each token `per_token` of `count` experts of `intermediate_size`. `normalised`: their shares, taken
    from a softmax over all, add up to one. A shared expert of `shared_size` serves every token by a gate of its own.
    `biased`: router and experts have biases.
    """

    count: int
    per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    normalised: bool
    shared_size: int = 0
    biased: bool = False


def read_experts(model_type: str, fields: Mapping[str, Any], path: Path, num_layers: int) -> ExpertsConfig | None:
    """The experts of a model; None where it has none. ModelError for a kind of them that is not supported."""
    reader = FieldReader(fields, path)
    if model_type in ("mixtral", "gpt_oss"):
        sparse = (True,) * num_layers
        count, inner = _count(reader, 8 if model_type == "mixtral" else 128), reader.count("intermediate_size")
        normalised, per_token = True, reader.count("num_experts_per_tok", 2 if model_type == "mixtral" else 4)
    elif model_type in ("qwen2_moe", "qwen3_moe"):
        dense, step = fields.get("mlp_only_layers") or [], reader.count("decoder_sparse_step", 1)
        sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
        first = model_type == "qwen2_moe"
        count, per_token = _count(reader, 60 if first else 128), reader.count("num_experts_per_tok", 4 if first else 8)
        inner = reader.count("moe_intermediate_size", 1408 if first else 768)
        normalised = bool(fields.get("norm_topk_prob", False))
    else:
        return None
    if per_token > count:
        raise reader.refuse(f"num_experts_per_tok {per_token} of {count} experts", "as many experts as a token takes")
    for name, value in {"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT}.items():
        if model_type == "gpt_oss" and reader.number(name, value) != value:
            raise reader.refuse(f"{name} {fields[name]!r}", f"{name} {value:g}")
    shared = reader.count("shared_expert_intermediate_size", 5632) if model_type == "qwen2_moe" else 0
    return ExpertsConfig(count, per_token, inner, sparse, normalised, shared, biased=model_type == "gpt_oss")


def _count(reader: FieldReader, default: int) -> int:
    """How many experts there are: transformers 5 writes the one name for the other."""
    return reader.count("num_local_experts", reader.count("num_experts", default))
