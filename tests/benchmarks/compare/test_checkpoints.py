from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.compare.checkpoints import BLOCK, FORMATS
from common.engine.weights.formats.awq import AWQ
from common.engine.weights.formats.compressed_tensors import CompressedTensors
from common.engine.weights.formats.float8 import Float8
from common.engine.weights.formats.gptq import GPTQ
from common.engine.weights.safetensors_weights import QuantisedSafetensors

LAYOUTS = {
    "GPTQ": GPTQ(zero_shift=1),
    "AWQ": AWQ(),
    "W4A16": CompressedTensors(),
    "W8A8": CompressedTensors(),
    "fp8 by tensor": CompressedTensors(),
    "fp8 by channel": CompressedTensors(),
    "fp8 by block": Float8(block=(BLOCK, BLOCK)),
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
