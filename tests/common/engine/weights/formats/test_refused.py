"""Checkpoints that would be read wrongly are refused before a weight is read, with the field or the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.models.load import open_model
from common.engine.weights.formats.compressed_tensors import CompressedTensors
from common.engine.weights.formats.format import WeightFormat
from common.engine.weights.formats.gptq import GPTQ
from common.engine.weights.formats.registry import read_weight_format
from common.errors import ModelError

from ...models.generation import files_of
from .checkpoints import AWQ_CONFIG, FORMATS, FP8, INT4, Tensors, compressed, gptq_config, write_checkpoint

GROUP = "config_groups.group_0"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'.*gptq, awq, compressed-tensors, fp8"),
    "gptq of 3 bits": (gptq_config(3, 128), "bits is 3, which is not supported.*4, 8"),
    "marlin": (gptq_config(4, 128, checkpoint_format="marlin"), "checkpoint_format is 'marlin'.*gptq, gptq_v2"),
    "old marlin": (gptq_config(4, 128, is_marlin_format=True), "is_marlin_format is True"),
    "awq gemv": (AWQ_CONFIG | {"version": "gemv"}, "version is 'gemv'.*gemm"),
    "awq without zero points": (AWQ_CONFIG | {"zero_point": False}, "zero_point is False.*True"),
    "awq of 1 bit that is true": (AWQ_CONFIG | {"bits": True}, "bits is True"),
    "fp8 of another kind": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'.*e4m3"),
    "fp8 with half a block": ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
    "fp4": (compressed("nvfp4-pack-quantized", **FP8), "format is 'nvfp4-pack-quantized'.*pack-quantized"),
    "packed 3 bits": (compressed("pack-quantized", **INT4 | {"num_bits": 3}), f"{GROUP}.weights.num_bits is 3"),
    "strategy": (compressed("int-quantized", **INT4 | {"strategy": "token"}), "strategy is 'token'.*channel, group"),
    "sparse": (
        compressed("pack-quantized", **INT4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format is 'sparse-24-bitmask'",
    ),
    "rotated": (
        compressed("pack-quantized", **INT4) | {"transform_config": {"config_groups": {"R3": {}}}},
        r"transform_config.config_groups is \['R3'\]",
    ),
    "no groups": ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is {}"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_refused(tmp_path: Path, name: str) -> None:
    fields, message = CONFIGS[name]
    with pytest.raises(ModelError, match=f"(?s)config.json: quantization_config.*{message}"):
        configured(tmp_path, fields)


def configured(folder: Path, fields: dict[str, Any], key: str = "quantization_config") -> WeightFormat | None:
    (folder / "config.json").write_text(json.dumps({key: fields}))
    return read_weight_format(folder / "config.json")


def test_configurations_are_understood_wherever_they_stand(tmp_path: Path) -> None:
    old = {name: value for name, value in compressed("pack-quantized", **INT4).items() if name != "quant_method"}
    assert configured(tmp_path, old, "compression_config") == CompressedTensors()
    assert configured(tmp_path, {"quantization_config": gptq_config(4, 128)}, "text_config") == GPTQ(zero_shift=1)
    blocks = compressed("float-quantized", **FP8, strategy="block", block_structure=[128, 64])
    assert configured(tmp_path, blocks) == CompressedTensors(block=(128, 64))
    assert configured(tmp_path, {}) is None


DOWN = "model.layers.1.mlp.down_proj"
Damage = Callable[[Tensors], object]
TENSORS: dict[str, tuple[str, Damage, str]] = {
    "scales lost": ("awq", lambda t: t.pop(f"{DOWN}.scales"), f"missing tensor {DOWN}.scales of a quantised"),
    "scales of another group size": (
        "awq",
        lambda t: t.update({f"{DOWN}.scales": torch.ones(7, 64).half()}),
        rf"{DOWN}.qzeros is \[5, 8\].*requires \[7, 8\]",
    ),
    "gptq of 2 bits": (
        "gptq int4",
        lambda t: t.update({f"{DOWN}.qzeros": torch.zeros(5, 4, dtype=torch.int32)}),
        "has 2 bits for each of 64 outputs",
    ),
    "group of no scales": (
        "gptq int4",
        lambda t: t.update({f"{DOWN}.g_idx": torch.zeros(9, dtype=torch.int32)}),
        rf"{DOWN}.g_idx is \[9\].*requires \[160\]",
    ),
    "packed to other bits": (
        "w4a16",
        lambda t: t.update({f"{DOWN}.weight_packed": torch.zeros(64, 10, dtype=torch.int32)}),
        r"is \[64, 10\], but 64 x 160 weights require \[64, 20\] for 4 bits or \[64, 40\] for 8 bits",
    ),
    "packed floats": (
        "w4a16",
        lambda t: t.update({f"{DOWN}.weight_packed": torch.zeros(64, 20)}),
        f"{DOWN}.weight_packed has type F32, must be I32",
    ),
    "scale of another matrix": (
        "w8a8 by channel",
        lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(63, 1)}),
        rf"{DOWN}.weight_scale is \[63, 1\].*requires \[64, 1\]",
    ),
    "blocks of another size": (
        "fp8 by block",
        lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(1, 5)}),
        rf"{DOWN}.weight_scale_inv is \[1, 5\].*64 x 160 requires",
    ),
    "nothing quantised": (
        "awq",
        lambda t: [t.pop(name) for name in list(t) if name.endswith("qweight")],
        "specifies awq weights, but none of the.*delete quantization_config .* if the weights were converted to floats",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_together_are_refused(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    format, damage, message = TENSORS[name]
    folder = tmp_path / "damaged"
    write_checkpoint(tiny_folder, folder, FORMATS[format])
    tensors = dict(load_file(folder / "model.safetensors"))
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"(?s){message}"):
        open_model(files_of(folder))


def test_an_order_that_names_no_group_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    write_checkpoint(tiny_folder, folder, FORMATS["gptq act order"])
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.g_idx"][3] = 5
    save_file(tensors, folder / "model.safetensors")
    _, source = open_model(files_of(folder))
    with pytest.raises(ModelError, match="g_idx has group 5 of 5"):
        source.read(f"{DOWN}.weight")
