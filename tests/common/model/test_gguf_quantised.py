from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from common.gguf_format.quantised import unpack_blocks

KINDS = [(GGMLQuantizationType.Q8_0, 8), (GGMLQuantizationType.Q4_0, 4), (GGMLQuantizationType.Q4_1, 4)]


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_codes_stand_for_what_the_library_reads(kind: GGMLQuantizationType, bits: int) -> None:
    values = np.random.default_rng(0).normal(size=(12, 96)).astype(np.float32)
    raw = quantize(values, kind)
    held = unpack_blocks(raw, kind)
    assert held is not None
    assert held.bits == bits
    assert held.numbers.shape == (12, 96)
    assert held.numbers.min() >= (0 if bits == 4 else -128)
    assert held.numbers.max() <= (15 if bits == 4 else 127)
    weights = held.numbers.reshape(12, 3, 32) * held.scale.astype(np.float32)[..., None]
    if held.offset is not None:
        weights = weights + held.offset.astype(np.float32)[..., None]
    np.testing.assert_allclose(weights.reshape(12, 96), dequantize(raw, kind), rtol=1e-3, atol=1e-4)


def test_other_formats_have_no_codes_to_use() -> None:
    raw = quantize(np.zeros((2, 256), np.float32), GGMLQuantizationType.Q5_0)
    assert unpack_blocks(raw, GGMLQuantizationType.Q5_0) is None
