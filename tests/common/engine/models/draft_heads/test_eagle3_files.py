"""Which EAGLE-3 heads fit which models, which layers they read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.models.draft_heads.drafting_model import DraftingModel
from common.engine.models.draft_heads.eagle3_config import is_eagle3
from common.engine.models.draft_heads.head_files import find_head
from common.engine.models.draft_heads.load import load_drafting_model
from common.engine.models.load import open_model
from common.errors import ConfigError, ModelError
from common.model_files.tiny import make_tiny_model

from .....eagle3_heads import eagle3_folder, vocabulary
from .....families import CASES
from ..generation import files_of, random_checkpoint

IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, Tensor]


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "served")


def load(served: Path, head: Path) -> DraftingModel:
    return load_drafting_model(files_of(served), str(head), num_places=4)


def reads(served: Path, head: Path) -> tuple[int, ...]:
    files = files_of(served)
    form = find_head(str(head), files, open_model(files)[0]).form
    assert form is not None
    return form.reads


def changed(head: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The head with other tensors."""
    save_file(change(load_file(head / "model.safetensors")), head / "model.safetensors")
    return head


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for name, each in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2, 2, 1)),  # the input of layer 2, of the middle one, and of the last but two of four
        ({IDS: [0, 2, 3]}, (0, 2, 3)),
        ({IDS: [3, 4]}, (3, 4)),
        ({IDS: [1, 2, 3]}, (2, 3, 4)),  # outputs of these layers
        ({"eagle_config": {IDS: [1, 0, 2]}}, (2, 1, 3)),
        ({"eagle_config": {IDS: [2, 3, 4], "use_aux_hidden_state": True}}, (2, 3, 4)),
    ],
)
def test_the_layers_that_it_reads(
    served: Path, tmp_path: Path, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert reads(served, eagle3_folder(tmp_path / "head", served, **fields)) == expected


def test_other_heads_are_none() -> None:
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    assert is_eagle3({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000})
    assert is_eagle3({"speculators_model_type": "eagle3"})


def test_a_head_may_name_the_model_type_of_its_model(served: Path, tmp_path: Path) -> None:
    """As SpecForge's for Phi and QwQ do: the architecture says that the layer is Llama's."""
    assert load(served, eagle3_folder(tmp_path / "head", served, model_type="phi3")).config.num_layers == 5


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_key_value_heads": 4}, "num_kv_heads 4 instead of 2"),
        ({"head_dim": 32}, "head_dim 32 instead of 16"),
        ({"vocab_size": 300}, "vocab_size 300 instead of 261"),
        ({"num_hidden_layers": 2}, "2 layers instead of 1"),
        ({"target_hidden_size": 128}, "for models of hidden_size 64: its target_hidden_size is 128"),
        ({IDS: [2, 3, 5]}, r"for models of 4 layers: it reads the inputs of layers \[2, 3, 5\]"),
        ({IDS: [1, 2, 4]}, r"for models of 4 layers: it reads the inputs of layers \[2, 3, 5\]"),
        ({IDS: ["2"]}, r"it reads the inputs of layers \['2'\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not supported"),
        ({"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3"}, "a head of model_type llama, not 'qwen3'"),
    ],
)
def test_a_head_of_another_model_is_refused(served: Path, tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(served, eagle3_folder(tmp_path / "head", served, **fields))


@pytest.mark.parametrize("case", ["deepseek-v3", "granite"])
def test_a_model_whose_states_no_head_reads_is_refused(tmp_path: Path, case: str) -> None:
    """Latents leave no room for keys and values of heads, and Granite's hidden states are scaled here."""
    family, options = CASES[case]
    served = random_checkpoint(tmp_path / "served", family, **options)
    with pytest.raises(ConfigError, match="EAGLE-3 heads are not supported for"):
        load(served, eagle3_folder(tmp_path / "head", served))


def wide_fc(tensors: Tensors) -> Tensors:
    return tensors | {"fc.weight": torch.zeros(64, 2 * 64)}


def far_tokens(tensors: Tensors) -> Tensors:
    return tensors | vocabulary(torch.arange(211, 311), 400)


def twice_the_same(tensors: Tensors) -> Tensors:
    return tensors | vocabulary(torch.arange(100) // 2, 261)


def floats(tensors: Tensors) -> Tensors:
    return tensors | {"d2t": tensors["d2t"].float()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("fc.weight"), "it has no tensor fc.weight"),
        (wide_fc, r"fc.weight is \[64, 128\], the configuration requires \[64, 192\]"),
        (without("d2t"), "missing tensor d2t, which maps its 100 tokens to the 261"),
        (far_tokens, "invalid d2t: 100 distinct tokens instead of 100, from 211 to 310, vocabulary 261"),
        (twice_the_same, "invalid d2t: 50 distinct tokens instead of 100"),
        (floats, r"d2t is torch.float32 \[100\], the configuration requires integers \[100\]"),
        (without("lm_head.weight"), r"missing tensor lm_head.weight, and the model's is not \[100, 64\]"),
        (without("midlayer.hidden_norm.weight"), "missing tensor model.layers.0.hidden_norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    served: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], why: str
) -> None:
    head = changed(eagle3_folder(tmp_path / "head", served, draft_vocab_size=100), change)
    with pytest.raises((ConfigError, ModelError), match=why):
        load(served, head)


def test_embeddings_of_another_size_must_be_its_own(served: Path, tmp_path: Path) -> None:
    head = eagle3_folder(tmp_path / "head", served, hidden_size=32, target_hidden_size=64)
    with pytest.raises(ModelError, match=r"missing tensor model.embed_tokens.weight.* have width 64 instead of 32"):
        load(served, head)


def test_a_copy_of_the_models_embeddings_is_held_once(served: Path, tmp_path: Path) -> None:
    table = load_file(served / "model.safetensors")["model.embed_tokens.weight"]
    head = changed(eagle3_folder(tmp_path / "head", served), lambda tensors: tensors | {"embed_tokens.weight": table})
    model = load(served, head)
    assert model._draft_head._decoder.weights.embedding is model.weights.embedding
    other = load(served, eagle3_folder(tmp_path / "other", served, own_embedding=True))
    assert other._draft_head._decoder.weights.embedding is not other.weights.embedding


def test_a_head_without_an_output_matrix_uses_the_models(served: Path, tmp_path: Path) -> None:
    model = load(served, changed(eagle3_folder(tmp_path / "head", served), without("lm_head.weight")))
    assert model._draft_head._weights.lm_head is model._lm_head  # type: ignore[attr-defined]


def test_pickled_weights_are_refused(served: Path, tmp_path: Path) -> None:
    head = eagle3_folder(tmp_path / "head", served)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are not loaded"):
        load(served, head)


def test_its_configuration_is_part_of_the_fingerprint(served: Path, tmp_path: Path) -> None:
    """The same tensors over other layers write other keys and values."""
    found = set()
    for ids in ([0, 2, 3], [0, 2, 4]):
        fields: dict[str, Any] = {IDS: ids}
        head = eagle3_folder(tmp_path / str(ids[-1]), served, **fields)
        assert json.loads((head / "config.json").read_text())[IDS] == ids
        found.add(load(served, head).config.draft_head)
    assert len(found) == 2
