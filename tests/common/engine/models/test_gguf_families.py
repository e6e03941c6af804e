"""GGUF files of families with experts, sinks and softcaps beside the checkpoints that they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from common.engine.models.batch import SequenceChunk
from common.engine.models.load import load_model, open_model
from common.engine.models.mlp import MixtureOfExperts
from common.errors import ModelError
from common.model_files.config import ModelConfig
from common.model_files.files import ModelFiles
from common.model_files.gguf.parts import gguf_name, gguf_parts
from common.model_files.gguf.tensors import GGUFFile
from common.model_files.resolve import resolve_model

from ....families import CASES
from .generation import Pool, files_of, load, prompt, random_checkpoint
from .gguf_checkpoint import GGUF_CASES, write_gguf

F32, Q8_0, MXFP4 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.MXFP4


def written(folder: Path, name: str, kind: GGMLQuantizationType = F32) -> tuple[Path, ModelFiles]:
    """The checkpoint, and the file that was made of it."""
    (family, options), (architecture, changes, more) = CASES[name], GGUF_CASES[name]
    dense = random_checkpoint(folder / "dense", family, **options | changes)
    path = write_gguf(dense, folder / "model.gguf", architecture, kind, **more)
    return dense, msgspec.structs.replace(files_of(dense), format="gguf", weights=(path,), config=None)


def rounded(config: ModelConfig) -> ModelConfig:
    """Numbers of which a GGUF file has 24 bits, rounded to fewer; without layers that are not read."""
    ropes = [
        replace(rope, factors=tuple(round(one, 4) for one in rope.factors), query_growth=round(rope.query_growth, 6))
        for rope in config.layer_ropes
    ]
    return replace(
        config,
        extra_layers=0,
        rms_norm_eps=round(config.rms_norm_eps, 9),
        layer_ropes=tuple(ropes),
        attention_scale=round(config.attention_scale, 6),
        embedding_scale=round(config.embedding_scale, 4),
    )


@pytest.mark.slow_except("mixtral", "phi4-mini", "granite", "deepseek-v3", "gpt-oss")
@pytest.mark.parametrize("name", GGUF_CASES)
def test_logits_and_tokens_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    dense, files = written(tmp_path, name)
    model, expected = load_model(files), load(dense)
    assert rounded(model.config) == rounded(expected.config)
    chunk, pools = prompt(60), (Pool(model), Pool(expected))
    logits = [pool.runner.forward([SequenceChunk(chunk, 0, pool.table(60), True)]) for pool in pools]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert pools[0].greedy(chunk, 20, chunk=16) == pools[1].greedy(chunk, 20, chunk=16)


def test_long_factors_are_found_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some converters name the scaling, others have its tensors alone."""
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    (family, options), (architecture, changes, more) = CASES["phi4-mini"], GGUF_CASES["phi4-mini"]
    dense = random_checkpoint(tmp_path / "dense", family, **options | changes)
    named = more | {"rope.scaling.type": "longrope"}
    path = write_gguf(dense, tmp_path / "model.gguf", architecture, F32, **named)
    config, _ = open_model(resolve_model(str(path)))
    assert rounded(config) == rounded(load(dense).config)


def test_a_model_in_several_files_is_that_of_one(tmp_path: Path) -> None:
    dense, files = written(tmp_path, "qwen3-moe")
    write_gguf(dense, tmp_path / "parts.gguf", "qwen3moe", F32, split=9)
    parts = gguf_parts(tmp_path / "parts-00002-of-00005.gguf")
    assert [gguf_name(part) for part in parts] == ["parts"] * 5 and parts[0].name == "parts-00001-of-00005.gguf"
    split = msgspec.structs.replace(files, weights=parts)
    assert Pool(load_model(split)).greedy(prompt(60), 10) == Pool(load_model(files)).greedy(prompt(60), 10)
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"is one of 5 files, of which \['parts-00003-of-00005.gguf'\] are missing"):
        gguf_parts(parts[0])


@pytest.mark.parametrize(("name", "kind"), [("qwen3-moe", Q8_0), ("mixtral", Q8_0), ("gpt-oss", MXFP4)])
def test_an_expert_is_its_part_of_a_stack(tmp_path: Path, name: str, kind: GGMLQuantizationType) -> None:
    _, files = written(tmp_path, name, kind)
    config, source = open_model(files)
    stored = GGUFFile(files.weights[0])
    place = "block_sparse_moe.experts.2.w2" if name == "mixtral" else "mlp.experts.2.down_proj"
    in_file = "blk.1.ffn_down_exps.weight"
    stack = dequantize(stored.raw(in_file), kind).reshape(stored.shape(in_file))
    whole = torch.from_numpy(np.ascontiguousarray(stack[2]))
    full = f"model.layers.1.{place}.weight"
    assert torch.equal(source.read(full), whole)
    held = source.read_quantised(full, floats=True)
    assert held is not None and held.bits == (4 if kind == MXFP4 else 8)
    assert torch.equal(held.dense(torch.float32), whole)
    if kind == MXFP4:
        assert source.read_quantised(full) is None, "no kernel of a CPU multiplies them"
    count = config.experts.count if config.experts else 0
    with pytest.raises(ModelError, match=f"has no part {count}"):
        source.read(full.replace(".2.", f".{count}."))


def test_experts_stay_in_the_integers_of_the_file(tmp_path: Path) -> None:
    _, files = written(tmp_path, "qwen3-moe", Q8_0)
    model = load_model(files, quantization="auto")
    for layer in model.weights.layers:  # type: ignore[attr-defined]
        assert isinstance(layer.mlp, MixtureOfExperts)
        packed = [linear.native for linear in (*layer.mlp.experts.gate_up, *layer.mlp.experts.down)]
        assert all(native is None or native.quantised for native in packed)  # None: no compiler here
    exact = Pool(load_model(files)).greedy(prompt(60), 6)
    assert Pool(model).greedy(prompt(60), 6)[:2] == exact[:2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": 9}, "expert_used_count 9 of 9 experts|9 of"),
        ({"expert_feed_forward_length": 0}, "expert_feed_forward_length is 0"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    family, options = CASES["qwen3-moe"]
    dense = random_checkpoint(tmp_path / "dense", family, **options | GGUF_CASES["qwen3-moe"][1] | {"num_experts": 8})
    path = write_gguf(dense, tmp_path / "model.gguf", "qwen3moe", F32, **changes)
    with pytest.raises(ModelError, match=message):
        open_model(msgspec.structs.replace(files_of(dense), format="gguf", weights=(path,), config=None))
