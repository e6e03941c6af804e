"""A mixture of experts, as config.json or the metadata of a GGUF file describe it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import shown
from common.model_files.architecture.fields import FieldReader
from common.model_files.architecture.latent import LATENT_TYPES

DEEPSEEK_LIKE = (*LATENT_TYPES, "glm4_moe", "dots1", "solar_open", "exaone_moe")
"""Model types whose experts are described as DeepSeek's are."""
PER_LAYER = ("mixtral", "gpt_oss", "minimax_m2", "olmoe", "granitemoe")
"""Model types with experts in every layer."""
QWEN_LIKE = ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text")
"""Model types with experts in the layers that `decoder_sparse_step` and `mlp_only_layers` select."""
SIGMOID_GATING = 2
"""Of GGUF's `expert_gating_func`."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of gpt-oss' gate, which the kernels have as "clamped_swiglu"."""


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Files that hold all experts of a layer in one tensor: its name, and that of the second products.

    `inputs_first`: floats are published as [experts, in, out], else as [experts, out, in]. `alternating`: a gate and an
    up follow each other, else all ups follow all gates. Quantised stacks are [experts, out, in].
    """

    gate_up: str
    down: str
    inputs_first: bool
    alternating: bool = False

    def is_turned(self, shape: Sequence[int], outputs: int, inputs: int) -> bool:
        """Whether floats of this shape are [experts, in, out]: transformers may write what it read the other way."""
        return self.inputs_first if outputs == inputs else tuple(shape[1:]) == (inputs, outputs)


STACKS: dict[str, ExpertStack] = {
    "gpt_oss": ExpertStack("mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs_first=True, alternating=True),
    "qwen3_vl_moe_text": ExpertStack("mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs_first=True),
    "mistral4": ExpertStack("mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs_first=False),
    "granitemoe": ExpertStack(
        "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight", inputs_first=False
    ),
}
"""By model type; a file of it may also hold each expert's matrices by themselves."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The layers that have experts in place of one MLP.

    A router gives each token `per_token` of `count` experts of `intermediate_size`. `normalised`: their shares, taken
    from a softmax over all, add up to one. A shared expert of `shared_size` serves every token, by a gate of its own
    where it is `shared_gated`. `biased`: router and experts have biases.

    DeepSeek's: scores are `sigmoid`s instead of a softmax; `corrected`: a number of each expert is added to its score
    before the best are chosen; those are of the `kept_groups` best of `groups` groups; shares are times `scale`.
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


def read_experts(model_type: str, fields: Mapping[str, Any], path: Path, num_layers: int) -> ExpertsConfig | None:
    """Read the experts of a model from its completed fields. None for a dense model. Raises ModelError."""
    reader = FieldReader(fields, path)
    if model_type in DEEPSEEK_LIKE:
        return _read_deepseek(reader, num_layers, model_type)
    if model_type in PER_LAYER:
        sparse, inner = (True,) * num_layers, reader.count("intermediate_size")
        normalised = model_type != "olmoe" or reader.flag("norm_topk_prob")
    elif model_type in QWEN_LIKE:
        dense, step = fields["mlp_only_layers"], reader.count("decoder_sparse_step")
        if not isinstance(dense, list | tuple):
            raise reader.wrong("mlp_only_layers", dense, "a list of layers")
        sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
        inner, normalised = reader.count("moe_intermediate_size"), reader.flag("norm_topk_prob")
    elif model_type == "ernie4_5_moe":
        return _read_ernie(reader, num_layers)
    else:
        return None
    count, per_token = reader.count("num_experts"), reader.count("num_experts_per_tok")
    if per_token > count:
        raise reader.refuse(f"num_experts_per_tok {per_token} of {count} experts", "as many experts as a token takes")
    for name, value in {"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT}.items():
        if model_type == "gpt_oss" and reader.number(name, value) != value:
            raise reader.refuse(f"{name} {shown(fields[name])}", f"{name} {value:g}")
    shared = reader.count("shared_expert_intermediate_size") if model_type == "qwen2_moe" else 0
    corrected = model_type == "minimax_m2"
    return ExpertsConfig(
        *(count, per_token, inner, sparse, normalised, shared),
        biased=model_type == "gpt_oss",
        sigmoid=corrected,
        corrected=corrected,
    )


def read_gguf_experts(reader: FieldReader, model_type: str, num_layers: int) -> ExpertsConfig | None:
    """The experts of a model in a GGUF file; None where it has none. Raises ModelError."""
    count = int(reader.number("expert_count", 0))
    if not count:
        return None
    per_token = reader.count("expert_used_count")
    if per_token > count:
        raise reader.refuse(f"expert_used_count {per_token} of {count} experts", "as many experts as a token takes")
    whole = model_type in ("mixtral", "olmoe", "granitemoe")  # which have no layer without experts
    inner = reader.count("feed_forward_length" if whole else "expert_feed_forward_length")
    if model_type in DEEPSEEK_LIKE:
        return _read_gguf_deepseek(reader, count, per_token, inner, num_layers, sigmoid=model_type != "deepseek_v2")
    if model_type == "ernie4_5_moe":
        found = _read_gguf_deepseek(reader, count, per_token, inner, num_layers, sigmoid=False)
        step = reader.count("interleave_moe_layer_step", 1)
        layers = tuple(sparse and (i + 1) % step == 0 for i, sparse in enumerate(found.layers))
        return replace(found, layers=layers, normalised=True, corrected=True)
    shared = int(reader.number("expert_shared_feed_forward_length", 0))
    if model_type == "granitemoe" and shared:
        raise reader.refuse(f"expert_shared_feed_forward_length {shared}", "experts without a shared one")
    if model_type == "qwen2_moe":  # files of 2024 do not tell the shared expert's width
        shared = reader.count("expert_shared_feed_forward_length", reader.count("feed_forward_length"))
    corrected = model_type == "minimax_m2"
    return ExpertsConfig(
        *(count, per_token, inner, (True,) * num_layers),
        normalised=model_type not in ("qwen2_moe", "olmoe"),
        shared_size=shared if model_type == "qwen2_moe" else 0,
        biased=model_type == "gpt_oss",
        sigmoid=corrected,
        corrected=corrected,
    )


def _read_gguf_deepseek(
    reader: FieldReader, count: int, per_token: int, inner: int, num_layers: int, *, sigmoid: bool
) -> ExpertsConfig:
    """DeepSeek's, and GLM's. A file without groups has none: llama.cpp computes it so."""
    groups = int(reader.number("expert_group_count", 1)) or 1
    kept = int(reader.number("expert_group_used_count", groups)) or groups
    _check_groups(reader, count, per_token, groups, kept, at_least=2 if sigmoid else 1)
    num_dense = int(reader.number("leading_dense_block_count", 0))
    return ExpertsConfig(
        *(count, per_token, inner, tuple(i >= num_dense for i in range(num_layers))),
        normalised=bool(reader.fields.get(f"{reader.prefix}expert_weights_norm", sigmoid)),
        shared_size=int(reader.number("expert_shared_count", 0)) * inner,
        shared_gated=False,
        sigmoid=sigmoid,
        corrected=sigmoid,
        groups=groups,
        kept_groups=kept,
        scale=reader.number("expert_weights_scale", 1.0) or 1.0,
    )


def _read_ernie(reader: FieldReader, num_layers: int) -> ExpertsConfig:
    """ERNIE 4.5's: the best of corrected softmaxes, in the layers of a range."""
    _expect(reader, "use_bias", reader.fields.get("use_bias"), None, False)
    first, step = reader.whole("moe_layer_start_index"), reader.count("moe_layer_interval")
    last = int(reader.number("moe_layer_end_index"))
    last = num_layers - 1 if last == -1 else last
    count, per_token = reader.count("num_experts"), reader.count("num_experts_per_tok")
    _check_groups(reader, count, per_token, 1, 1, at_least=1)
    inner = reader.count("moe_intermediate_size")
    return ExpertsConfig(
        *(count, per_token, inner),
        tuple(first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)),
        normalised=True,
        shared_size=reader.whole("moe_num_shared_experts") * inner,
        shared_gated=False,
        corrected=True,
    )


def _read_deepseek(reader: FieldReader, num_layers: int, model_type: str) -> ExpertsConfig:
    """DeepSeek V2's, or V3's, which others have too; Mistral Small 4 has softmaxes in V3's way."""
    fields, third = reader.fields, model_type != "deepseek_v2"
    sigmoid = third and model_type != "mistral4"
    count, per_token = reader.count("n_routed_experts"), reader.count("num_experts_per_tok")
    method = fields.get("topk_method", "noaux_tc" if third else "greedy")
    allowed = ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    _expect(reader, "topk_method", method, *allowed)
    scoring = ("sigmoid", "noaux_tc") if model_type == "dots1" else ("sigmoid" if sigmoid else "softmax",)
    _expect(reader, "scoring_func", fields.get("scoring_func"), None, *scoring)
    _expect(reader, "moe_layer_freq", fields.get("moe_layer_freq"), None, 1)
    groups = kept = 1
    if method != "greedy":
        groups, kept = (reader.count(name) for name in ("n_group", "topk_group"))
    if model_type == "mistral4":  # its groups are chosen in a third way
        _expect(reader, "n_group", groups, 1)
    if not third:  # transformers ignores it, DeepSeek's own code then leaves out the scale
        _expect(reader, "norm_topk_prob", fields.get("norm_topk_prob"), None, False)
    _check_groups(reader, count, per_token, groups, kept, at_least=2 if third else 1)
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


def _sparse_layers(reader: FieldReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: those that a list names (GLM-4.7-Flash), or all behind the first few."""
    kinds = reader.fields.get("mlp_layer_types")
    if isinstance(kinds, list):
        if len(kinds) != num_layers or not all(kind in ("dense", "sparse") for kind in kinds):
            raise reader.refuse(f"mlp_layer_types {shown(kinds)} of {num_layers} layers", "dense or sparse layers")
        return tuple(kind == "sparse" for kind in kinds)
    num_dense = reader.whole("first_k_dense_replace")
    return tuple(i >= num_dense for i in range(num_layers))


def _expect(reader: FieldReader, name: str, value: object, *allowed: object) -> None:
    if value not in allowed:
        named = " or ".join(repr(one) for one in allowed if one is not None)
        raise reader.refuse(f"{name} {shown(value)} of {reader.fields['model_type']}", f"{name} {named}")


def _check_groups(reader: FieldReader, count: int, per_token: int, groups: int, kept: int, *, at_least: int) -> None:
    """ModelError where a token cannot be given as many experts as it takes."""
    if count % groups or count // groups < at_least:
        wanted = f"groups of {at_least} experts or more, all of one size"
        raise reader.refuse(f"n_group {groups} of {count} experts", wanted)
    if kept > groups:
        raise reader.refuse(f"topk_group {kept} of {groups} groups", f"topk_group {groups} or less")
    if per_token > kept * (count // groups):
        held = kept * (count // groups)
        raise reader.refuse(f"num_experts_per_tok {per_token} of {held} experts in {kept} groups", f"at most {held}")
