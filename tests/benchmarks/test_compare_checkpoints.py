from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.compare.checkpoints import BLOCK, FORMATS
from common.engine.weights.formats.quantization_config import CheckpointLayout, QuantizationConfig
from common.engine.weights.quantised_safetensors import QuantisedSafetensors

LAYOUTS = {
    "GPTQ": QuantizationConfig(CheckpointLayout.GPTQ, zero_shift=1),
    "AWQ": QuantizationConfig(CheckpointLayout.AWQ),
    "W4A16": QuantizationConfig(CheckpointLayout.COMPRESSED),
    "W8A8": QuantizationConfig(CheckpointLayout.COMPRESSED),
    "fp8 by tensor": QuantizationConfig(CheckpointLayout.COMPRESSED),
    "fp8 by channel": QuantizationConfig(CheckpointLayout.COMPRESSED),
    "fp8 by block": QuantizationConfig(CheckpointLayout.FLOAT8, block=(BLOCK, BLOCK)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_near_what_it_was(tmp_path: Path, name: str) -> None:
    weight = torch.randn(160, 192, generator=torch.Generator().manual_seed(1))
    parts = FORMATS[name][0](weight)
    save_file({f"m.{part}": tensor.contiguous() for part, tensor in parts.items()}, tmp_path / "model.safetensors")
    layout = next(config for start, config in LAYOUTS.items() if name.startswith(start))
    read = QuantisedSafetensors([tmp_path / "model.safetensors"], layout).read("m.weight")
    error = float((read - weight).norm() / weight.norm())
    assert 1e-3 < error < (0.15 if "4" in name.split()[1] or name.startswith("W4") else 0.04)
