"""Mixture of experts, read from config.json or GGUF metadata. Does not load torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import shown
from common.model_files.architecture.fields import FieldReader

SIGMOID_GATING = 2
"""Value of GGUF's `expert_gating_func` for sigmoid scores."""


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Tensors that store all experts of a layer: names of the gate and up projections and of the down projection.

    Float tensors are [experts, in, out] if `inputs_first`, else [experts, out, in]; quantised ones are always
    [experts, out, in]. Rows of gate and up alternate if `alternating`, otherwise all gates precede all ups.
    up follow each other, else all ups follow all gates. Quantised stacks are [experts, out, in].
    """

    gate_up: str
    down: str
    inputs_first: bool
    alternating: bool = False

    def is_turned(self, shape: Sequence[int], outputs: int, inputs: int) -> bool:
        """Whether a float tensor of this shape is [experts, in, out]. transformers may write either layout."""
        return self.inputs_first if outputs == inputs else tuple(shape[1:]) == (inputs, outputs)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers that have experts instead of an MLP.

    A router selects `per_token` of `count` experts of `intermediate_size` for each token. Their weights are taken from
    a softmax over all experts, and sum to one if `normalised`. A shared expert of `shared_size` computes every token,
    with its own gate if `shared_gated`. With `biased`, router and experts have biases.

    In DeepSeek's variant, scores are sigmoids if `sigmoid`. If `corrected`, a bias per expert is added to the scores
    for the selection. Experts are selected from the best `kept_groups` of `groups` groups. Weights are multiplied by
    `scale`.
    """

    count: int
    per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    normalised: bool
    shared_size: int = 0
    biased: bool = False
    shared_gated: bool = True
    sigmoid: bool = False
    corrected: bool = False
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0


def experts_in_all_layers(
    reader: FieldReader,
    num_layers: int,
    *,
    normalised: bool | str = True,
    biased: bool = False,
    corrected: bool = False,
) -> ExpertsConfig:
    """Read experts of `intermediate_size` in all layers, as in Mixtral. Raises ModelError.

    `normalised` is a flag, or the field that has it. With `corrected`, scores are corrected sigmoids.
    """
    inner = reader.count("intermediate_size")
    normalised = reader.flag(normalised) if isinstance(normalised, str) else normalised
    return ExpertsConfig(
        *(*count_experts(reader), inner, (True,) * num_layers, normalised),
        biased=biased,
        sigmoid=corrected,
        corrected=corrected,
    )


def grouped_experts(
    reader: FieldReader,
    num_layers: int,
    *,
    methods: Sequence[str] = ("noaux_tc",),
    scoring: Sequence[str] = ("sigmoid",),
    sigmoid: bool = True,
    normalises: bool = True,
    one_group: bool = False,
    at_least: int = 2,
) -> ExpertsConfig:
    """Read grouped experts, as in DeepSeek V3. Raises ModelError.

    `methods` are the accepted values of `topk_method` (default first), `scoring` those of `scoring_func`. With
    `sigmoid`, scores are corrected sigmoids. With `normalises`, weights may sum to one. With `one_group`, groups are
    not supported. A group has `at_least` experts.
    """
    fields = reader.fields
    count, per_token = reader.count("n_routed_experts"), reader.count("num_experts_per_tok")
    method = fields.get("topk_method", methods[0])
    expect(reader, "topk_method", method, *methods)
    expect(reader, "scoring_func", fields.get("scoring_func"), None, *scoring)
    expect(reader, "moe_layer_freq", fields.get("moe_layer_freq"), None, 1)
    groups = kept = 1
    if method != "greedy":
        groups, kept = (reader.count(name) for name in ("n_group", "topk_group"))
    if one_group:
        expect(reader, "n_group", groups, 1)
    if not normalises:  # transformers ignores it, DeepSeek's code then omits the scale
        expect(reader, "norm_topk_prob", fields.get("norm_topk_prob"), None, False)
    check_groups(reader, count, per_token, groups, kept, at_least=at_least)
    inner = reader.count("moe_intermediate_size")
    return ExpertsConfig(
        count,
        per_token,
        inner,
        _sparse_layers(reader, num_layers),
        reader.flag("norm_topk_prob"),
        reader.whole("n_shared_experts") * inner,
        shared_gated=False,
        sigmoid=sigmoid,
        corrected=sigmoid,
        groups=groups,
        kept_groups=kept,
        scale=reader.number("routed_scaling_factor"),
    )


def gguf_experts(
    reader: FieldReader,
    num_layers: int,
    *,
    inner: str = "expert_feed_forward_length",
    normalised: bool = True,
    biased: bool = False,
    corrected: bool = False,
) -> ExpertsConfig | None:
    """Read the experts of a GGUF file, in all layers. `inner` is the field of their width. Returns None if it has none.

    Other parameters as in `experts_in_all_layers`.
    """
    if (chosen := _count_gguf_experts(reader)) is None:
        return None
    width = reader.count(inner)
    reader.number("expert_shared_feed_forward_length", 0)
    return ExpertsConfig(
        *(*chosen, width, (True,) * num_layers),
        normalised=normalised,
        biased=biased,
        sigmoid=corrected,
        corrected=corrected,
    )


def gguf_grouped_experts(reader: FieldReader, num_layers: int, *, sigmoid: bool = True) -> ExpertsConfig | None:
    """Read the grouped experts of a GGUF file, as in DeepSeek. Like llama.cpp, defaults to one group.

    Returns None for a model without experts. Raises ModelError.
    """
    if (chosen := _count_gguf_experts(reader)) is None:
        return None
    inner = reader.count("expert_feed_forward_length")
    groups = int(reader.number("expert_group_count", 1)) or 1
    kept = int(reader.number("expert_group_used_count", groups)) or groups
    check_groups(reader, *chosen, groups, kept, at_least=2 if sigmoid else 1)
    num_dense = int(reader.number("leading_dense_block_count", 0))
    return ExpertsConfig(
        *(*chosen, inner, tuple(i >= num_dense for i in range(num_layers))),
        normalised=bool(reader.fields.get(f"{reader.prefix}expert_weights_norm", sigmoid)),
        shared_size=int(reader.number("expert_shared_count", 0)) * inner,
        shared_gated=False,
        sigmoid=sigmoid,
        corrected=sigmoid,
        groups=groups,
        kept_groups=kept,
        scale=reader.number("expert_weights_scale", 1.0) or 1.0,
    )


def count_experts(reader: FieldReader) -> tuple[int, int]:
    """Return the number of experts and the number per token. Raises ModelError."""
    count, per_token = reader.count("num_experts"), reader.count("num_experts_per_tok")
    if per_token > count:
        raise reader.refuse(
            f"num_experts_per_tok {per_token} of {count} experts", f"num_experts_per_tok of at most {count}"
        )
    return count, per_token


def _count_gguf_experts(reader: FieldReader) -> tuple[int, int] | None:
    count = int(reader.number("expert_count", 0))
    if not count:
        return None
    per_token = reader.count("expert_used_count")
    if per_token > count:
        raise reader.refuse(
            f"expert_used_count {per_token} of {count} experts", f"expert_used_count of at most {count}"
        )
    return count, per_token


def _sparse_layers(reader: FieldReader, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: those of a list (GLM-4.7-Flash, K-EXAONE), or all after the first few."""
    kinds = reader.fields.get("mlp_layer_types")
    if isinstance(kinds, list):
        if len(kinds) != num_layers or not all(kind in ("dense", "sparse") for kind in kinds):
            raise reader.refuse(f"mlp_layer_types {shown(kinds)} of {num_layers} layers", "dense or sparse layers")
        return tuple(kind == "sparse" for kind in kinds)
    if (flags := reader.fields.get("is_moe_layer")) is not None:
        if not isinstance(flags, list) or not all(isinstance(flag, bool) for flag in flags):
            raise reader.refuse(f"is_moe_layer {shown(flags)}", "a list of true and false")
        if len(flags) != num_layers:
            raise reader.refuse(f"is_moe_layer of {len(flags)} layers", f"one of {num_layers}")
        return tuple(flags)
    num_dense = reader.whole("first_k_dense_replace")
    return tuple(i >= num_dense for i in range(num_layers))


def expect(reader: FieldReader, name: str, value: object, *allowed: object) -> None:
    """Raise ModelError for a `value` of the field `name` that is not allowed."""
    if value not in allowed:
        named = " or ".join(repr(one) for one in allowed if one is not None)
        raise reader.refuse(f"{name} {shown(value)} of {reader.fields['model_type']}", f"{name} {named}")


def check_groups(reader: FieldReader, count: int, per_token: int, groups: int, kept: int, *, at_least: int) -> None:
    """Raise ModelError if the groups are invalid or have too few experts for a token."""
    if count % groups or count // groups < at_least:
        wanted = f"groups of {at_least} experts or more, all of one size"
        raise reader.refuse(f"n_group {groups} of {count} experts", wanted)
    if kept > groups:
        raise reader.refuse(f"topk_group {kept} of {groups} groups", f"topk_group {groups} or less")
    if per_token > kept * (count // groups):
        held = kept * (count // groups)
        raise reader.refuse(f"num_experts_per_tok {per_token} of {held} experts in {kept} groups", f"at most {held}")
