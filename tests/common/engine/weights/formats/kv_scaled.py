"""Gives a checkpoint the scales of a cache of fp8, as the tools that measure them write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.engine.weights.formats.kv_scales import NAMES
from kernels import KVScales

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def scales_of_layers(num_layers: int, *, times: float = 1.0) -> tuple[KVScales, ...]:
    """Other ones for each layer, no powers of 2, and so small that the largest keys and values do not fit."""
    numbers = torch.tensor([[0.0031 * (1 + i), 0.0017 * (3 - i % 3)] for i in range(num_layers)]) * times
    return tuple(KVScales(key, value) for key, value in numbers.tolist())


def scale_tensors(scales: Sequence[KVScales], names: tuple[str, str] = NAMES[0]) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(number)
        for layer, pair in enumerate(scales)
        for name, number in zip(names, pair, strict=True)
    }


def with_kv_scales(
    folder: Path, target: Path, tensors: Mapping[str, torch.Tensor], scheme: Mapping[str, Any] | None = SCHEME
) -> Path:
    """A copy of a checkpoint with these tensors and that `kv_cache_scheme`."""
    shutil.copytree(folder, target)
    stored = load_file(folder / "model.safetensors") | dict(tensors)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    usual = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    if scheme is not None:
        config["quantization_config"] = config.get("quantization_config", usual) | {"kv_cache_scheme": dict(scheme)}
    (target / "config.json").write_text(json.dumps(config))
    return target
