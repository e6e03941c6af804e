"""The language models of models that also see, against the whole ones, which transformers made and asked in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ....families import CASES
from .generation import SIZES, Pool, files_of, load, logits_along, prompt, random_checkpoint, transformers_greedy
from .threaded_ranks import greedy_of_ranks

VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 96}
LAYERS = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
PLACES = {"rope_type": "default", "rope_theta": 1e6}
"""Of tokens in three dimensions, which are the same number in text."""
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {"rope_parameters": PLACES | {"mrope_section": [2, 3, 3]}},
        {"depth": 1, "embed_dim": 32, "hidden_size": 96, "num_heads": 2, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": PLACES | {"mrope_section": [2, 3, 3]}}, VISION),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 32, "rope_parameters": PLACES | {"mrope_section": [8, 4, 4]}},
        VISION | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            **{"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
            "rope_parameters": PLACES | {"mrope_section": [8, 4, 4]},
        },
        VISION | {"deepstack_visual_indexes": [0]},
    ),
    "internvl": ("InternVL", {"model_type": "qwen3", "head_dim": 32}, LAYERS),
    "mistral3": ("Mistral3", {"model_type": "ministral3", "head_dim": 32}, LAYERS | {"model_type": "pixtral"}),
    "mistral3-latent": (
        "Mistral3",
        SIZES | CASES["mistral4"][1] | {"model_type": "mistral4"},
        LAYERS | {"model_type": "pixtral"},
    ),
}
"""By name: transformers' name of the model, and what differs from the usual in its text and in its eyes."""


def seeing_model(folder: Path, name: str) -> Any:
    """A model of random weights, saved to the folder; what it says of its text."""
    import transformers

    family, text, vision = SEEING[name]
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(text_config=SIZES | text, vision_config=vision)
    config.text_config.tie_word_embeddings = config.tie_word_embeddings = False
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        spread = 0.3 if "norm" in parameter_name or "bias" in parameter_name else 0.15
        parameter.data = torch.randn(parameter.shape) * spread + (1.0 if "norm" in parameter_name else 0.0)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow_except("qwen3_vl_moe")
@pytest.mark.parametrize("name", SEEING)
def test_words_alone_have_the_tokens_of_the_whole_model(tmp_path: Path, name: str) -> None:
    tokens, logits = transformers_greedy(seeing_model(tmp_path, name), prompt(90), 12)
    assert len(set(tokens)) > 3
    pool = Pool(load(tmp_path))
    assert pool.greedy(prompt(90), 12, chunk=16) == tokens
    assert float((logits_along(pool, prompt(90), tokens) - logits).abs().max()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_experts_of_one_tensor_are_read_in_both_ways_that_they_are_written(tmp_path: Path, turned: bool) -> None:
    """As published, [experts, in, out] both, and as transformers saves what it made itself; by two ranks as by one."""
    tokens, _ = transformers_greedy(seeing_model(tmp_path, "qwen3_vl_moe"), prompt(50), 12)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "mlp.experts." in name:
            outputs = 96 if name.endswith("down_proj") else 80
            if (tensor.shape[1] == outputs) is not turned:
                tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})
    assert Pool(load(tmp_path)).greedy(prompt(50), 12) == tokens
    assert greedy_of_ranks(files_of(tmp_path), 2, prompt(50), 12) == [tokens] * 2


@pytest.mark.parametrize(
    ("case", "wrapper", "tied"),
    [
        pytest.param("ministral3", "mistral3", False, marks=pytest.mark.slow),
        pytest.param("ministral3", "mistral3", True, marks=pytest.mark.slow),
        ("deepseek-v3", "kimi_k25", False),
    ],
)
def test_a_configuration_around_it_need_not_tell_of_a_head(tmp_path: Path, case: str, wrapper: str, tied: bool) -> None:
    """Tensors have another name in front, as in published files."""
    family, options = CASES[case]
    plain = random_checkpoint(tmp_path / "plain", family, **options | {"tie_word_embeddings": tied})
    config = json.loads((plain / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    if wrapper == "kimi_k25":
        config["model_type"] = "kimi_k2"
    folder = tmp_path / "wrapped"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": wrapper, "text_config": config}))
    tensors = load_file(plain / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    eyes = {"vision_tower.patch_conv.weight": torch.zeros(3)}
    save_file(renamed | eyes, folder / "model.safetensors", {"format": "pt"})
    assert ("lm_head.weight" in tensors) is not tied
    assert Pool(load(folder)).greedy(prompt(60), 12) == Pool(load(plain)).greedy(prompt(60), 12)


@pytest.mark.slow
def test_a_configuration_that_has_it_all_in_one_is_read(tmp_path: Path) -> None:
    """As transformers 4 wrote those of Qwen2-VL and Qwen2.5-VL."""
    tokens, _ = transformers_greedy(seeing_model(tmp_path, "qwen2_5_vl"), prompt(50), 12)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    flat = config["text_config"] | {"model_type": "qwen2_5_vl", "vision_config": config["vision_config"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(flat))
    assert Pool(load(tmp_path)).greedy(prompt(50), 12) == tokens
