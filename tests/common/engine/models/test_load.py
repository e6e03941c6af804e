"""What loads, and that whatever does not says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.models.load import load_model, open_model
from common.engine.models.mlp import MLP
from common.errors import ModelError
from common.model_files.config import from_hf
from common.model_files.files import ModelFiles
from common.model_files.gguf.tensors import GGUFFile
from common.model_files.gguf_config import TensorFacts, from_gguf
from common.model_files.quantization import Quantization
from kernels.backends import FOUND
from kernels.plain import backend as plain_backend

from ....oracle import Oracle
from .generation import Pool, files_of, load, prompt

Damage = Callable[[Path], None]


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def set_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(weights)
    save_file(weights, path)


KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
DOWN = "model.layers.1.mlp.down_proj.weight"
REFUSED: dict[str, tuple[Damage, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "not a model folder: config.json is missing"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "not valid JSON.*fetch"),
    "config of another kind": (lambda f: (f / "config.json").write_text("[]"), "must contain a JSON object, not list"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights file.*download"),
    "truncated weights": (lambda f: cut(f / "model.safetensors", 0.5), "truncated or damaged.*download"),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0.0), "truncated or damaged.*download"),
    "noise": (lambda f: (f / "model.safetensors").write_bytes(b"noise" * 99), "truncated or damaged.*download"),
    "missing tensor": (lambda f: change_weights(f, lambda w: w.pop(DOWN)), "missing tensor model.layers.1.mlp.down"),
    "missing head": (lambda f: change_weights(f, lambda w: w.pop("lm_head.weight")), "missing tensor lm_head.weight"),
    "wrong shape": (
        lambda f: set_config(f, intermediate_size=96),
        r"is \[160, 64\], the configuration requires \[96, 64\]",
    ),
    "wrong vocabulary": (lambda f: set_config(f, vocab_size=99), r"embed_tokens.*is \[261, 64\].*requires \[99, 64\]"),
    "integers": (lambda f: change_weights(f, lambda w: w.update({DOWN: w[DOWN].to(torch.int8)})), "dtype torch.int8"),
    "architecture": (lambda f: set_config(f, model_type="mamba"), "'mamba' is not supported: use a model with llama"),
    "quantised": (lambda f: set_config(f, quantization_config={"bits": 4}), "quant_method is None, which is not"),
    "rope": (lambda f: set_config(f, rope_scaling={"type": "spiral", "factor": 2.0}), "'spiral' is not supported"),
    "long rope": (
        lambda f: set_config(f, rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}),
        "long_factor is a list of 7, expected 8 positive numbers",
    ),
    "partial rope": (
        lambda f: set_config(f, partial_rotary_factor=0.2),
        "factor 0.2 of heads of 16 is not",
    ),
    "activation": (lambda f: set_config(f, hidden_act="relu"), "hidden_act 'relu' is not supported"),
    "text for a number": (lambda f: set_config(f, num_hidden_layers="four"), "num_hidden_layers is 'four'"),
    "no layers": (lambda f: set_config(f, num_hidden_layers=0), "num_hidden_layers is 0"),
    "heads": (lambda f: set_config(f, num_key_value_heads=3), "4 attention heads are not a multiple of 3 KV heads"),
}


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(folder: Path, name: str) -> None:
    damage, message = REFUSED[name]
    damage(folder)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load(folder)


@pytest.mark.parametrize(("dtype", "device"), [("float16", "cpu"), ("float32", "nowhere"), ("float32", "meta:x")])
def test_refused_settings(tiny_folder: Path, dtype: str, device: str) -> None:
    with pytest.raises(ModelError, match="float32, bfloat16|use cpu"):
        load_model(files_of(tiny_folder), dtype=dtype, device=device)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_files_of_another_dtype_are_converted(folder: Path, stored: torch.dtype) -> None:
    change_weights(folder, lambda w: w.update({name: tensor.to(stored) for name, tensor in w.items()}))
    model = load(folder, "bfloat16")
    assert model.dtype == torch.bfloat16 and len(Pool(model).greedy(prompt(20), 4)) == 4


def test_shards(folder: Path) -> None:
    expected = Pool(load(folder)).greedy(prompt(30), 8)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i in range(2):
        part = {name: tensor for j, (name, tensor) in enumerate(weights.items()) if j % 2 == i}
        save_file(part, folder / f"model-{i + 1:05}-of-00002.safetensors")
    assert Pool(load(folder)).greedy(prompt(30), 8) == expected
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="a weights file is missing"):
        load(folder)


def test_a_multimodal_checkpoint_serves_its_text_model(folder: Path) -> None:
    expected = Pool(load(folder)).greedy(prompt(30), 8)

    def rename(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[f"language_model.{name}"] = weights.pop(name)
        weights["vision_tower.x"] = torch.zeros(3)

    change_weights(folder, rename)
    assert Pool(load(folder)).greedy(prompt(30), 8) == expected


@pytest.mark.parametrize("layout", ["old", "new"])
def test_gemma3_rope_in_both_layouts(tmp_path: Path, layout: str) -> None:
    base = {
        "model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1,
        "hidden_size": 64, "intermediate_size": 64, "vocab_size": 99, "head_dim": 16, "sliding_window": 32,
    }  # fmt: skip
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    full = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 2e4}}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | (old if layout == "old" else new)))
    config = from_hf(path)
    assert (
        config.layer_windows == (32, 32, 32, 32, 32, 0) and config.tie_embeddings and config.family.decoder == "gemma"
    )
    assert [rope.theta for rope in config.layer_ropes] == [2e4] * 5 + [5e5]
    assert [rope.factor for rope in config.layer_ropes] == [1.0] * 5 + [8.0]


# ---------------------------------------------------------------------------------------------------------------- GGUF


@pytest.fixture(params=[gguf.GGMLQuantizationType.F32])
def gguf_path(tiny_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The tiny llama as llama.cpp's converter writes it, q and k rows permuted; the MLP in the type asked for."""
    path, weights = tmp_path / "tiny.gguf", load_file(tiny_folder / "model.safetensors")
    writer = gguf.GGUFWriter(str(path), "llama")
    for add, value in [
        (writer.add_block_count, 4), (writer.add_context_length, 4096), (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 160), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 10000.0),
        (writer.add_rope_dimension_count, 16),
    ]:  # fmt: skip
        add(value)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, tensor in weights.items():
        array, stored = (
            tensor.numpy(),
            {"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight"),
        )
        if name == "lm_head.weight":
            stored = "output.weight"
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            stored = f"blk.{layer}.{names[part]}.weight"
            if part.endswith(("q_proj", "k_proj")):
                heads = 4 if "q_proj" in part else 2
                array = array.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(array.shape).copy()
        kind = request.param if array.ndim == 2 and "ffn" in stored else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_files(path: Path) -> ModelFiles:
    return msgspec.structs.replace(files_of(path.parent), format="gguf", weights=(path,), config=None)


def test_gguf_gives_the_logits_of_the_folder_it_was_made_from(gguf_path: Path, tiny_folder: Path) -> None:
    found, expected = (Oracle(model) for model in (load_model(gguf_files(gguf_path)), load(tiny_folder)))
    logits = [oracle.forward(prompt(60), oracle.empty_cache()) for oracle in (found, expected)]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-5
    assert found.config.num_kv_heads == 2 and not found.config.tie_embeddings


@pytest.mark.parametrize("gguf_path", [gguf.GGMLQuantizationType[name] for name in KINDS], indirect=True, ids=KINDS)
def test_gguf_values_equal_the_gguf_package(gguf_path: Path) -> None:
    file, reader = GGUFFile(gguf_path), gguf.GGUFReader(gguf_path)
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(file.read(tensor.name), expected.reshape(file.shape(tensor.name)))


@pytest.mark.parametrize(
    ("gguf_path", "expected"),
    [(gguf.GGMLQuantizationType.F16, "none"), (gguf.GGMLQuantizationType.Q8_0, "auto")],
    indirect=["gguf_path"],
    ids=["F16", "Q8_0"],
)
def test_auto_is_none_without_codes_to_keep(gguf_path: Path, expected: str) -> None:
    model = load_model(gguf_files(gguf_path), quantization="auto")
    assert model.quantization == expected
    mlp = model.weights.layers[0].mlp
    assert isinstance(mlp, MLP)
    packed = mlp.down.native
    assert packed is None or packed.quantised == (expected == "auto")  # None: no compiler here


def test_auto_is_none_for_a_folder_of_floats(tiny_folder: Path) -> None:
    assert load_model(files_of(tiny_folder), quantization="auto").quantization == "none"
    auto = Quantization.AUTO
    assert auto.effective(quantised_file=False) is Quantization.NONE
    assert auto.effective(quantised_file=True) is auto
    assert Quantization.INT8.effective(quantised_file=False) is Quantization.INT8


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_truncated_gguf(gguf_path: Path, share: float) -> None:
    cut(gguf_path, share)
    with pytest.raises(ModelError, match="[Ff]etch|convert|not a GGUF file"):
        load_model(gguf_files(gguf_path))


def test_missing_gguf(tmp_path: Path) -> None:
    files = msgspec.structs.replace(files_of(tmp_path), format="gguf", weights=(tmp_path / "none.gguf",))
    with pytest.raises(ModelError, match="none.gguf cannot be read"):
        load_model(files)


def test_gguf_without_a_tensor(gguf_path: Path) -> None:
    gguf_path.write_bytes(gguf_path.read_bytes().replace(b"blk.2.ffn_gate.weight", b"blk.2.ffn_gone.weight"))
    with pytest.raises(ModelError, match="no tensor blk.2.ffn_gate.weight.*fetch"):
        load_model(gguf_files(gguf_path))


def test_gguf_of_an_unknown_architecture(gguf_path: Path) -> None:
    file = GGUFFile(gguf_path)
    with pytest.raises(ModelError, match="'mamba' is not supported: use a model with llama"):
        from_gguf(file.metadata | {"general.architecture": "mamba"}, TensorFacts(9), gguf_path)


def test_gguf_with_rope_scaling_that_is_not_supported(gguf_path: Path) -> None:
    metadata = GGUFFile(gguf_path).metadata | {"llama.rope.scaling.type": "longrope"}
    with pytest.raises(ModelError, match="rope scaling 'longrope'"):
        from_gguf(metadata, TensorFacts(9), gguf_path)


def test_the_built_in_models_are_understood(smollm2_files: ModelFiles) -> None:
    config, source = open_model(smollm2_files)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.vocab_size == 49152 and config.tie_embeddings and config.layer_ropes[0].theta == 1e5
    assert source.read("model.layers.0.self_attn.k_proj.weight").shape == (192, 576)


def test_batch_invariance_is_refused_where_plain_torch_computes(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FOUND, "cpu", plain_backend)
    with pytest.raises(ModelError, match="--batch-invariant requires Diptych's kernels on cpu: install a C"):
        load_model(files_of(tiny_folder), batch_invariant=True)
    assert load_model(files_of(tiny_folder)).config.num_layers
