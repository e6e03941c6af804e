from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from common.engine.weights.formats.mxfp4 import MXFP4
from common.engine.weights.safetensors_weights import QuantisedSafetensors

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def e2m1(field: int) -> float:
    """The value of a float of a sign, two bits of exponent (bias 1) and one of fraction."""
    sign, exponent, fraction = -1.0 if field & 8 else 1.0, field >> 1 & 3, field & 1
    return sign * (0.5 * fraction if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2))


def test_experts_are_what_their_blocks_stand_for(tmp_path: Path) -> None:
    source = np.random.default_rng(3)
    blocks = source.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = source.integers(110, 140, (2, 6, 3), dtype=np.uint8)
    expected = np.zeros((2, 6, 96))
    for expert, row, group, at in np.ndindex(*blocks.shape):
        byte, scale = int(blocks[expert, row, group, at]), 2.0 ** (int(scales[expert, row, group]) - 127)
        expected[expert, row, 32 * group + 2 * at] = e2m1(byte & 15) * scale
        expected[expert, row, 32 * group + 2 * at + 1] = e2m1(byte >> 4) * scale
    path = tmp_path / "model.safetensors"
    router = torch.randn(2, 96)
    tensors = {f"{EXPERTS}_blocks": torch.from_numpy(blocks), f"{EXPERTS}_scales": torch.from_numpy(scales)}
    save_file(tensors | {"model.layers.0.mlp.router.weight": router}, path)
    weights = QuantisedSafetensors([path], MXFP4())
    assert weights.has(EXPERTS) and weights.is_quantised(EXPERTS) and weights.read_quantised(EXPERTS) is None
    assert torch.equal(weights.read(EXPERTS), torch.from_numpy(expected).float())
    assert torch.equal(weights.read("model.layers.0.mlp.router.weight"), router)
