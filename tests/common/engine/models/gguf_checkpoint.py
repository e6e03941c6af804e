"""A checkpoint of Hugging Face's as llama.cpp's converter writes it, by the names that the package gguf has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from safetensors.torch import load_file

from common.model_files.tokenizer import byte_alphabet

from .k_quants import quantised

Array = npt.NDArray[Any]
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rotary_dim",
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
OLD_LATENT = {"rope.dimension_count": 16, "attention.key_length": 56, "attention.value_length": 24}
NEW_LATENT = {
    **{"rope.dimension_count": 16, "attention.key_length": 48, "attention.value_length": 32},
    **{"attention.key_length_mla": 56, "attention.value_length_mla": 24},
}
"""Heads' widths, of a file with one matrix for keys and values, and of one that holds their parts apart."""
GGUF_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("llama", {}, {}),
    "qwen2-moe": ("qwen2moe", {"decoder_sparse_step": 1}, {}),
    "qwen3-moe": ("qwen3moe", {"mlp_only_layers": [], "moe_intermediate_size": 64}, {}),
    "phi3": ("phi3", {}, {}),
    "phi4-mini": ("phi3", {}, {"rope.scaling.original_context_length": 64}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}, {}),
    "smollm3": (
        "smollm3",
        {"no_rope_layer_interval": 4, "num_hidden_layers": 4, "use_sliding_window": False, "tie_word_embeddings": True},
        {},
    ),
    "granite": (
        "granite",
        {},
        {"attention.scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
    ),
    "seed-oss": ("seed_oss", {"attention_out_bias": False}, {}),
    "ernie": ("ernie4_5", {"use_bias": False}, {}),
    "glm4": ("glm4", {}, {"rope.dimension_count": 16}),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo2", {}, YARN | {"rope.freq_base": 10000.0}),
    "exaone4": ("exaone4", {"sliding_window_pattern": 4, "num_hidden_layers": 4}, {}),
    "exaone4-full": ("exaone4", {}, {}),
    "ministral3": (
        "mistral3",
        {},
        YARN | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
    ),
    "glm4-moe": ("glm4moe", {}, {"rope.dimension_count": 16, "expert_gating_func": 2}),
    "minimax-m2": (
        "minimax-m2",
        {},
        {"rope.dimension_count": 16, "expert_feed_forward_length": 160, "expert_gating_func": 2},
    ),
    "dots1": ("dots1", {"sliding_window": None, "norm_topk_prob": True}, {"expert_gating_func": 2}),
    "ernie-moe": (
        "ernie4_5-moe",
        {},
        {
            **{"expert_count": 6, "expert_used_count": 3, "expert_shared_count": 2, "leading_dense_block_count": 1},
            "interleave_moe_layer_step": 1,
        },
    ),
    "olmoe": ("olmoe", {}, {}),
    "granite-moe": (
        "granitemoe",
        {},
        {"attention.scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0},
    ),
    "deepseek-v2": ("deepseek2", {"attention_bias": False}, OLD_LATENT | {"expert_gating_func": 1}),
    "deepseek-v2-lite": (
        "deepseek2",
        {},
        NEW_LATENT | YARN | {"rope.scaling.yarn_log_multiplier": 0.0707, "attention.kv_lora_rank": 40},
    ),
    "deepseek-v3": (
        "deepseek2",
        {},
        NEW_LATENT | YARN | {"rope.scaling.yarn_log_multiplier": 0.1, "expert_gating_func": 2},
    ),
    "gpt-oss": ("gpt-oss", {}, YARN | {"expert_feed_forward_length": 160}),
}
"""By case: the architecture's name, what a GGUF file cannot tell otherwise, and metadata that it has besides."""
PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe")
"""Architectures of which the converter makes neighbours of the elements that are rotated together."""


def write_gguf(
    folder: Path,
    path: Path,
    architecture: str,
    kind: GGMLQuantizationType | Mapping[str, GGMLQuantizationType],
    *,
    split: int = 0,
    **more: Any,
) -> Path:
    """Writes the model of a folder to `path`, matrices of MLPs and experts in `kind`, with `more` metadata.

    Or matrices of each name in the file, as "attn_q", in a kind of their own. With `split` to files of so many
    tensors each, beside `path`.
    """
    config = json.loads((folder / "config.json").read_text())
    counts = [config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    config |= {"num_local_experts": next((count for count in counts if count), None)}
    rope = config.get("rope_parameters") or {}
    config |= {key: value for key, value in rope.items() if key == "rope_theta"}
    if architecture == "phi3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        config["rotary_dim"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=split)
    found = {key: config.get(name) for key, name in KEYS.items()} | more
    for key, value in found.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{architecture}.{key}", value)
    _add_vocabulary(writer, config["vocab_size"])
    (known,) = (number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, config["num_hidden_layers"])
    for length in ("short", "long") if "long_factor" in rope else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    apart = "attention.key_length_mla" in more
    for name, array in _converted(folder, config, architecture, apart=apart):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        written = _kind_of(stored, kind) if array.ndim > 1 and "bias" not in stored else GGMLQuantizationType.F32
        writer.add_tensor(stored, quantised(np.ascontiguousarray(array), written), raw_dtype=written)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind_of(stored: str, kind: GGMLQuantizationType | Mapping[str, GGMLQuantizationType]) -> GGMLQuantizationType:
    if isinstance(kind, Mapping):
        return kind.get(stored.split(".")[-2], GGMLQuantizationType.F32)
    return kind if "ffn_" in stored and "inp" not in stored else GGMLQuantizationType.F32


def _add_vocabulary(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    """Bytes, one merge, and control tokens, of which the last ends an answer."""
    tokens = [*byte_alphabet(), "12"]
    tokens += [f"<|{i}|>" for i in range(len(tokens), num_tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (num_tokens - 257))
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(num_tokens - 1)


def _converted(
    folder: Path, config: dict[str, Any], architecture: str, *, apart: bool = False
) -> list[tuple[str, Array]]:
    """Names and tensors, experts of a layer stacked; what makes keys and values of latents `apart`, if asked to."""
    stacks: dict[str, dict[int, Array]] = defaultdict(dict)
    made: list[tuple[str, Array]] = []
    for name, tensor in load_file(folder / "model.safetensors").items():
        array: Array = tensor.float().numpy()
        if architecture in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            shape = (heads, 2, array.shape[0] // heads // 2, array.shape[1])
            array = array.reshape(shape).swapaxes(1, 2).reshape(array.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if (expert := EXPERT.fullmatch(name)) is not None:
            place = expert[1].replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            place = place if architecture == "llama" else expert[1]
            stacks[f"{place}.{expert[3]}.weight"][int(expert[2])] = array
        elif apart and name.endswith("kv_b_proj.weight"):
            made += _of_latents(name, array, config)
        elif name.endswith("input_linear.weight"):
            place, half = name.replace("block_sparse_moe.input_linear", "mlp.experts.{}_proj"), array.shape[1] // 2
            made += [(place.format("gate"), array[:, :half]), (place.format("up"), array[:, half:])]
        elif architecture == "gpt-oss" and ".experts." in name:
            made += _of_gpt_oss(name, array)
        else:
            if "e_score_correction" in name:
                name, array = name.replace("e_score_correction_bias", "e_score_correction.bias"), array.squeeze()
            made.append((f"{name}.weight" if name.endswith("sinks") else name, array))
    return made + [(name, np.stack([stack[i] for i in range(len(stack))])) for name, stack in stacks.items()]


def _of_latents(name: str, array: Array, config: dict[str, Any]) -> list[tuple[str, Array]]:
    """Keys' part [heads, rank, nope], values' part [heads, value, rank]."""
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    whole = array.reshape(heads, -1, array.shape[1])
    return [
        (name.replace("kv_b_proj", "k_b_proj"), whole[:, :nope].swapaxes(1, 2)),
        (name.replace("kv_b_proj", "v_b_proj"), whole[:, nope:]),
    ]


def _of_gpt_oss(name: str, array: Array) -> list[tuple[str, Array]]:
    """Gates and ups apart, and [experts, out, in]."""
    module, _, part = name.rpartition(".")
    if not part.endswith("bias"):
        array = array.swapaxes(1, 2)
    kind = "bias" if part.endswith("bias") else "weight"
    if part.startswith("down"):
        return [(f"{module}.down_proj.{kind}", array)]
    return [(f"{module}.gate_proj.{kind}", array[:, 0::2]), (f"{module}.up_proj.{kind}", array[:, 1::2])]
