"""Other families against transformers, which made their checkpoints: the same tokens, from nearly the same logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ModelError
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from kernels.cpu.backend import native_backend

from ....families import CASES
from .generation import Pool, load, logits_along, prompt, random_checkpoint, transformers_greedy, transformers_model


@pytest.mark.slow_except("deepseek-v3", "olmo3", "yarn-untruncated", "dynamic")
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    family, options = CASES[name]
    folder = random_checkpoint(tmp_path, family, **options)
    tokens, logits = transformers_greedy(transformers_model(folder), prompt(90), 24)
    model = load(folder)
    assert len(set(tokens)) > 4
    for block_size, chunk in [(16, 512), (64, 16), (16, 1)]:
        assert Pool(model, block_size=block_size).greedy(prompt(90), 24, chunk=chunk) == tokens
    assert float((logits_along(Pool(model), prompt(90), tokens) - logits).abs().max()) < 1e-3


@pytest.mark.parametrize(
    "name",
    [
        "exaone4",
        pytest.param("glm4", marks=pytest.mark.slow),
        pytest.param("granite", marks=pytest.mark.slow),
        "olmo3",
        pytest.param("smollm3", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_one_program_of_the_same_bits(tmp_path: Path, name: str) -> None:
    """Norms behind a layer's parts, of all heads as one, and layers that rotate nothing are operations of programs."""
    if native_backend() is None:
        pytest.skip("no C++ compiler here")
    family, options = CASES[name]
    folder = random_checkpoint(tmp_path, family, **options)
    model, single = load(folder), load(folder)
    single.run_by_operation()
    logits = [logits_along(Pool(one), prompt(60), prompt(4, seed=2)) for one in (model, single)]
    assert model.program is not None and single.program is None
    assert torch.equal(*logits)


@pytest.mark.slow
def test_longrope_takes_the_short_factors_where_contexts_end_before_the_long_ones(tmp_path: Path) -> None:
    """The magnitude stays that of the whole context if the configuration says so."""
    family, options = CASES["phi4-mini"]
    folder = random_checkpoint(tmp_path, family, **options)
    tokens, logits = transformers_greedy(transformers_model(folder), prompt(30), 20)
    long = load(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["attention_factor"] = (1 + math.log(2048 / 64) / math.log(64)) ** 0.5
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    short = load(folder)
    assert Pool(short).greedy(prompt(30), 20) == tokens
    assert float((logits_along(Pool(short), prompt(30), tokens) - logits).abs().max()) < 1e-3
    assert float((logits_along(Pool(long), prompt(30), tokens) - logits).abs().max()) > 1e-2


def refusal(folder: Path, **fields: Any) -> str:
    """The description of a tiny model with other fields in its configuration, before its weights are looked at."""
    path = make_tiny_model(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError) as error:
        resolve_model(str(folder))
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "llama4_text"},
            "model_type 'llama4_text' is not supported: use a model with llama, mistral, mix",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 32},
            "num_experts_per_tok 8 of 4 experts is not supported",
        ),
        (
            {"model_type": "gpt_oss", "swiglu_limit": 5.0},
            "swiglu_limit 5.0 is not supported: use a model with swiglu_lim",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 0},
            "num_local_experts is 0.0, expected a positive whole number",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor is '4', expected a number"),
        (
            {"rope_parameters": {"rope_type": "3d"}},
            "rope scaling '3d' is not supported: use a model with rope scaling def",
        ),
        (
            {"model_type": "granite", "residual_multiplier": 0.0},
            "residual_multiplier is 0.0, expected a positive number",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1]},
            "no_rope_layers of 1 layers is not supported: use a model with one of 4",
        ),
        (
            {"model_type": "glm4_moe", "mlp_layer_types": ["dense", "gated"]},
            "mlp_layer_types ['dense', 'gated'] of 4 layers is not supported",
        ),
        (
            {"model_type": "mistral4", "n_group": 2, "num_key_value_heads": 4},
            "n_group 2 of mistral4 is not supported: use a model with n_group 1",
        ),
        (
            {"model_type": "ernie4_5_moe", "use_bias": True},
            "use_bias True of ernie4_5_moe is not supported: use a model with use_bias False",
        ),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        (
            {"model_type": "phi3", "partial_rotary_factor": 1.5},
            "partial_rotary_factor 1.5 of heads of 16 is not support",
        ),
    ],
)
def test_what_is_not_supported_is_refused_before_weights_are_read(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    said = refusal(tmp_path / "model", **fields)
    assert message in said and "config.json" in said
