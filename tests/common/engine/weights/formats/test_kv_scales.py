"""Scales of a cache of fp8: read by every name, used where they are asked for, refused where they divide by nothing."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.models.load import kv_form, load_model, open_model
from common.engine.weights.formats.kv_scales import NAMES, KVCacheFormat
from common.engine.weights.formats.registry import read_weight_format
from common.errors import ModelError
from common.model_files import KVScheme, read_kv_scheme
from kernels import UNSCALED, KVScales

from ...models.generation import files_of
from .checkpoints import FORMATS, Tensors, write_checkpoint
from .kv_scaled import SCHEME, scale_tensors, scales_of_layers, with_kv_scales

LAYERS = 4
SCALES = scales_of_layers(LAYERS)


def form_of(folder: Path, setting: str = "auto") -> KVCacheFormat:
    return kv_form(files_of(folder), setting, "bfloat16")


@pytest.mark.parametrize("names", NAMES)
def test_every_name_is_read(tiny_folder: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    folder = with_kv_scales(tiny_folder, tmp_path / "scaled", scale_tensors(SCALES, names))
    scales = tuple(KVScales(value, value) for _, value in SCALES) if names == ("kv_scale", "kv_scale") else SCALES
    assert form_of(folder) == form_of(folder, "fp8") == KVCacheFormat("fp8", scales)
    assert form_of(folder, "native") == KVCacheFormat("bfloat16") and form_of(folder, "int8") == KVCacheFormat("int8")


def test_the_shapes_and_types_that_tools_write(tiny_folder: Path, tmp_path: Path) -> None:
    tensors = scale_tensors(SCALES)
    for name, shape in (("k", [1]), ("v", [1, 1])):
        tensors[f"model.layers.1.self_attn.{name}_scale"] = torch.full(shape, 0.25, dtype=torch.bfloat16)
    found = form_of(with_kv_scales(tiny_folder, tmp_path / "scaled", tensors)).scales
    assert found == (SCALES[0], KVScales(0.25, 0.25), *SCALES[2:])


def test_scales_are_used_without_a_scheme_only_where_they_are_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    folder = with_kv_scales(tiny_folder, tmp_path / "scaled", scale_tensors(SCALES), scheme=None)
    assert form_of(folder) == KVCacheFormat("bfloat16") and form_of(folder, "fp8").scales == SCALES


def test_without_scales_there_is_fp8_as_it_is(tiny_folder: Path) -> None:
    assert form_of(tiny_folder) == KVCacheFormat("bfloat16")
    found = form_of(tiny_folder, "fp8")
    assert found == KVCacheFormat("fp8") and "without scales" in found.in_words and found.cut(LAYERS) == found


def test_a_scheme_is_for_quantised_weights_as_well(tiny_folder: Path, tmp_path: Path) -> None:
    """Scales lie beside a module's own, in whose part of the file no rank is to look for heads."""
    write_checkpoint(tiny_folder, tmp_path / "fp8", FORMATS["fp8 by channel"])
    folder = with_kv_scales(tmp_path / "fp8", tmp_path / "scaled", scale_tensors(SCALES, NAMES[2]))
    assert form_of(folder) == KVCacheFormat("fp8", SCALES)
    assert load_model(files_of(folder), quantization="none").config.num_layers == LAYERS


def test_a_scheme_alone_leaves_weights_in_floats(tiny_folder: Path, tmp_path: Path) -> None:
    folder = with_kv_scales(tiny_folder, tmp_path / "scaled", scale_tensors(SCALES))
    assert read_weight_format(folder / "config.json") is None
    assert not open_model(files_of(folder))[1].has_quantised
    assert read_kv_scheme(folder / "config.json") == KVScheme()
    assert read_kv_scheme(tiny_folder / "config.json") is None


@pytest.mark.parametrize(
    ("change", "unread"),
    [
        ({"num_bits": 4}, "num_bits 4"),
        ({"type": "int"}, "type 'int'"),
        ({"strategy": "attn_head"}, "strategy 'attn_head'"),
        ({"dynamic": True}, "dynamic True"),
        ({"symmetric": False}, "symmetric False"),
    ],
)
def test_other_schemes_leave_the_cache_in_the_models_type(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], unread: str
) -> None:
    folder = with_kv_scales(tiny_folder, tmp_path / "scaled", {}, SCHEME | change)
    with caplog.at_level(logging.INFO):
        assert form_of(folder) == KVCacheFormat("bfloat16")
    assert f"kv_cache_scheme (unsupported {unread}): KV cache dtype is bfloat16" in caplog.text


def test_modelopt_leaves_out_scales_of_one(tiny_folder: Path, tmp_path: Path) -> None:
    """Its older checkpoints have their configuration in a file next to config.json."""
    dense = write_checkpoint(tiny_folder, tmp_path / "fp8", FORMATS["fp8 of old"])
    folder = tmp_path / "fp8"
    shutil.copy(dense / "config.json", folder / "config.json")
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    name = "model.layers.1.mlp.down_proj.weight"
    source, floats = (open_model(files_of(one))[1] for one in (folder, dense))
    assert source.is_quantised(name) and torch.equal(source.read(name), floats.read(name))
    assert form_of(folder) == KVCacheFormat("fp8")
    assert form_of(with_kv_scales(folder, tmp_path / "scaled", scale_tensors(SCALES, NAMES[1]), None)).scales == SCALES


KEY, VALUE = "model.layers.2.self_attn.k_scale", "model.layers.2.self_attn.v_scale"
Damage = Callable[[Tensors], object]
REFUSED: dict[str, tuple[Damage, str]] = {
    "zero": (lambda t: t.update({KEY: torch.zeros(())}), f"tensor {KEY} is 0, a scale must be positive and finite"),
    "NaN": (
        lambda t: t.update({VALUE: torch.tensor(float("nan"))}),
        f"tensor {VALUE} is nan, a scale must be positive and finite",
    ),
    "negative": (
        lambda t: t.update({VALUE: torch.tensor(-1.0)}),
        f"tensor {VALUE} is -1, a scale must be positive and finite",
    ),
    "infinite": (
        lambda t: t.update({KEY: torch.tensor(float("inf"))}),
        f"tensor {KEY} is inf, a scale must be positive and finite",
    ),
    "too small": (
        lambda t: t.update({KEY: torch.tensor(1e-60, dtype=torch.float64)}),
        f"tensor {KEY} is 0, a scale must be positive and finite",
    ),
    "by head": (
        lambda t: t.update({KEY: torch.ones(2)}),
        rf"tensor {KEY} is \[2\] of float32, must be one float for all heads",
    ),
    "whole": (
        lambda t: t.update({KEY: torch.ones((), dtype=torch.int32)}),
        rf"tensor {KEY} is \[\] of int32, must be one float",
    ),
    "absent": (lambda t: t.pop(VALUE), f"missing tensor {VALUE}, a scale of its fp8 KV cache"),
    "a layer absent": (lambda t: (t.pop(KEY), t.pop(VALUE)), f"missing tensor {KEY}, a scale of its fp8 KV cache"),
    "all absent": (lambda t: t.clear(), "missing tensor model.layers.0.self_attn.k_scale, a scale of its fp8 KV cache"),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_a_scale_is_refused_by_its_name_and_value(tiny_folder: Path, tmp_path: Path, damage: str) -> None:
    tensors, (change, message) = scale_tensors(SCALES), REFUSED[damage]
    change(tensors)
    folder = with_kv_scales(tiny_folder, tmp_path / "scaled", tensors)
    with pytest.raises(ModelError, match=f"(?s){message}.*--kv-cache-dtype native"):
        form_of(folder)
    assert form_of(folder, "native") == KVCacheFormat("bfloat16")


def test_a_draft_heads_layer_has_scales_if_the_file_has_some_for_it(tiny_folder: Path, tmp_path: Path) -> None:
    """An MTP layer lies behind those of the model."""
    more = scales_of_layers(LAYERS + 1)
    form = form_of(with_kv_scales(tiny_folder, tmp_path / "mtp", scale_tensors(more)))
    assert form.cut(LAYERS + 1).scales == more and form.cut(LAYERS).scales == SCALES
    form = form_of(with_kv_scales(tiny_folder, tmp_path / "scaled", scale_tensors(SCALES)))
    assert form.cut(LAYERS + 1).scales == (*SCALES, UNSCALED)
