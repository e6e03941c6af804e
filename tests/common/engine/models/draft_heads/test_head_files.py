"""Which heads fit which models, what is refused, and what workers with other heads have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.run.loaded import LoadedModel
from common.errors import ConfigError, ModelError
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model

from .....draft_heads import eagle_folder

SMALL: dict[str, Any] = {"kv_memory_gib": 0.01, "threads": 1, "dtype": "float32", "kernel_check": False}


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "served")


def load(served: Path, head: str, **more: Any) -> LoadedModel:
    config = DecodeWorkerConfig(**(SMALL | {"model": str(served), "draft_head": head} | more))
    return LoadedModel.load(resolve_model(str(served)), config)


def test_its_layer_is_one_more_of_the_models_blocks(served: Path, tmp_path: Path) -> None:
    alone, loaded = load(served, ""), load(served, str(eagle_folder(tmp_path / "head", served)))
    assert alone.drafting is None and loaded.drafting is not None
    assert loaded.kv.block_bytes == alone.kv.block_bytes * 5 // 4
    assert loaded.kv.num_blocks == pytest.approx(alone.kv.num_blocks * 4 / 5, abs=1)
    assert loaded.drafting.num_places >= 128


def test_the_fingerprint_covers_the_head_and_the_answers_do_not(served: Path, tmp_path: Path) -> None:
    """Workers with another head exchange no blocks, and may go on with each other's streams."""
    heads = ["", *(str(eagle_folder(tmp_path / f"head-{seed}", served, seed=seed)) for seed in (1, 2))]
    loaded = [load(served, head) for head in heads]
    assert len({each.fingerprint for each in loaded}) == 3
    assert len({each.weights for each in loaded}) == 1
    assert load(served, heads[1]).fingerprint == loaded[1].fingerprint


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_key_value_heads": 4}, "num_kv_heads 4 instead of 2"),
        ({"num_attention_heads": 8}, "num_heads 8 instead of 4"),
        ({"head_dim": 32}, "head_dim 32 instead of 16"),
        ({"vocab_size": 300}, "vocab_size 300 instead of 261"),
        ({"num_hidden_layers": 2}, "2 layers instead of 1"),
        ({"model_type": "qwen3"}, "a head of model_type llama, not 'qwen3'"),
    ],
)
def test_a_head_of_another_model_is_refused(served: Path, tmp_path: Path, fields: dict[str, object], why: str) -> None:
    folder = eagle_folder(tmp_path / "head", served, **fields)
    with pytest.raises(ConfigError, match=why):
        load(served, str(folder))


def test_an_eagle_3_head_is_refused(served: Path, tmp_path: Path) -> None:
    folder = eagle_folder(tmp_path / "head", served)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"fc.weight": torch.zeros(64, 192)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="an EAGLE or EAGLE-2 head, whose fc has 128 inputs: this one has 192"):
        load(served, str(folder))


def test_what_is_no_head_is_refused(served: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_head.*mtp, or a folder with the config.json of an EAGLE head"):
        load(served, str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="has no tensor fc.weight"):
        load(served, str(plain_layer(tmp_path / "plain", served)))
    folder = eagle_folder(tmp_path / "pickled", served)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not loaded"):
        load(served, str(folder))


def plain_layer(folder: Path, served: Path) -> Path:
    """A head without its first matrix."""
    eagle_folder(folder, served)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if name != "fc.weight"}, folder / "model.safetensors")
    return folder


def test_a_model_without_mtp_layers_is_refused(served: Path) -> None:
    with pytest.raises(ConfigError, match="draft_head.*served has no supported MTP layers"):
        load(served, "mtp")


def test_families_with_hidden_states_of_their_own_are_refused(served: Path, tmp_path: Path) -> None:
    gemma = make_tiny_model(tmp_path / "gemma", architecture="gemma3")
    head = eagle_folder(tmp_path / "head", served)
    with pytest.raises(ConfigError, match=r"EAGLE heads are not supported for gemma \(gemma3_text\)"):
        load(gemma, str(head))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tensor_parallel_size": 2}, "empty with --tensor-parallel-size 2"),
        ({"max_loras": 1}, "empty with LoRA adapters"),
        ({"draft_model": "tiny-random"}, "empty with --draft-head mtp"),
        (
            {"batch_invariant": True, "device": "cuda", "max_draft_tokens": 0},
            "draft_head.*empty with --batch-invariant on cuda",
        ),
    ],
)
def test_settings_that_contradict_it(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DecodeWorkerConfig(model="tiny-random", draft_head="mtp", **more)


def test_a_model_that_embeds_is_refused(served: Path, tmp_path: Path) -> None:
    config = PrefillWorkerConfig(
        **(SMALL | {"model": str(served), "task": "embed", "draft_head": str(eagle_folder(tmp_path / "head", served))})
    )
    with pytest.raises(ConfigError, match="draft_head.*empty for a model with --task embed"):
        LoadedModel.load(resolve_model(str(served)), config)
