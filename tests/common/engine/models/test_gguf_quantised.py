from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from common.engine.models.load import open_model
from common.engine.models.weights import Assembler
from common.model_files.files import ModelFiles
from common.model_files.gguf.quantised import UNPACKERS, QuantisedBlocks, unpack_blocks
from common.model_files.quantization import Quantization
from kernels import Linear, QuantisedWeight, unified
from kernels.cpu.packed import panel_size

from .k_quants import quantised

SIMPLE = [kind for kind in UNPACKERS if not kind.name.endswith("_K")]
K_QUANTS = [kind for kind in UNPACKERS if kind.name.endswith("_K")]
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 numbers of a block are."""


def raw_of(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """A tensor's bytes: quantised by the gguf package, or, of K-quants, which it does not write, drawn at random."""
    source = np.random.default_rng(seed)
    if kind in SIMPLE:
        return np.asarray(quantize(source.normal(size=(rows, columns)).astype(np.float32), kind))
    packed, size = GGML_QUANT_SIZES[kind]
    blocks = source.integers(0, 256, (rows, columns // packed, size), dtype=np.uint8)
    for at in HALVES[kind.name]:
        halves = source.uniform(0.0005, 0.002, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize(("kind", "steps"), [(GGMLQuantizationType.Q4_K, 15), (GGMLQuantizationType.Q6_K, 63)])
def test_tests_write_k_quants_that_the_library_reads(kind: GGMLQuantizationType, steps: int) -> None:
    """No weight is further off than one and a half steps of its group: half a step, and what the scales lose."""
    weight = np.random.default_rng(3).normal(size=(12, 768)).astype(np.float32)
    read = dequantize(quantised(weight, kind), kind)
    size = 32 if kind == GGMLQuantizationType.Q4_K else 16
    span = np.abs(weight.reshape(-1, size)).max(-1, keepdims=True) * 2 / steps
    assert float((np.abs(read - weight).reshape(-1, size) / span).max()) < 1.5


def weight_of(held: QuantisedBlocks | None) -> QuantisedWeight:
    assert held is not None
    arrays = (held.numbers, held.scale, held.offset, held.steps, held.offset_steps)
    numbers, scale, *rest = (None if array is None else torch.from_numpy(array) for array in arrays)
    assert numbers is not None and scale is not None
    return QuantisedWeight(held.bits, held.group, numbers, scale, *rest)


@pytest.mark.parametrize("kind", UNPACKERS, ids=lambda kind: kind.name)
def test_codes_stand_for_what_the_library_reads(kind: GGMLQuantizationType) -> None:
    raw = raw_of(kind, 12, 768)
    held = unpack_blocks(raw, kind)
    assert held is not None and held.numbers.shape == (12, 768)
    assert held.numbers.min() >= (-128 if held.bits == 8 else 0)
    assert held.numbers.max() == 2 ** (held.bits - 1 if held.bits == 8 else held.bits) - 1
    expected = torch.from_numpy(dequantize(raw, kind))
    tolerance = 0.0 if kind in K_QUANTS else 1e-3  # a minimum is added in another order
    torch.testing.assert_close(weight_of(held).dense(torch.float32), expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("kind", UNPACKERS, ids=lambda kind: kind.name)
def test_what_is_packed_loses_nothing(kind: GGMLQuantizationType) -> None:
    weight = weight_of(unpack_blocks(raw_of(kind, 45, 512), kind))
    linear = Linear(weight, dtype=torch.float32)
    assert torch.equal(linear.weight, weight.dense(torch.float32))
    if linear.native is not None:
        bits = {"Q8_0": 9.5, "Q4_0": 5, "Q4_1": 5, "Q5_0": 6, "Q5_1": 6, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}
        rows = -(-45 // panel_size()) * panel_size()
        assert linear.native.num_bytes * 8 == bits[kind.name] * 512 * rows


@pytest.mark.parametrize(
    "names", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q4_K", "Q5_K"), ("Q5_0", "Q5_0", "Q8_0")]
)
def test_formats_that_meet_in_one_matrix_lose_nothing(names: tuple[str, ...]) -> None:
    kinds = [GGMLQuantizationType[name] for name in names]
    raws = [raw_of(kind, 20 + i, 512, seed=i) for i, kind in enumerate(kinds)]
    whole = unified([weight_of(unpack_blocks(raw, kind)) for raw, kind in zip(raws, kinds, strict=True)])
    assert whole is not None
    expected = torch.cat([torch.from_numpy(dequantize(raw, kind)) for raw, kind in zip(raws, kinds, strict=True)])
    assert torch.equal(whole.dense(torch.float32), expected)
    linear = Linear(whole, dtype=torch.float32)
    assert torch.equal(linear.weight, expected)


@pytest.mark.parametrize("names", [("Q4_1", "Q8_0"), ("Q4_K", "Q8_0")])
def test_formats_without_a_common_one_do_not_meet(names: tuple[str, ...]) -> None:
    kinds = [GGMLQuantizationType[name] for name in names]
    assert unified([weight_of(unpack_blocks(raw_of(kind, 4, 256), kind)) for kind in kinds]) is None


def test_other_formats_have_no_codes_to_use() -> None:
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType.Q3_K]
    assert unpack_blocks(np.zeros((2, size), np.uint8), GGMLQuantizationType.Q3_K) is None


@pytest.mark.slow
def test_a_published_q4_k_m_file_keeps_all_its_matrices(gemma3_files: ModelFiles) -> None:
    """Its layers mix Q4_K, Q6_K, Q5_0 and Q8_0."""
    config, source = open_model(gemma3_files)
    assembler = Assembler(config, source, torch.float32, torch.device("cpu"), Quantization.AUTO)
    for index in (0, 9):
        prefix = f"model.layers.{index}."
        layer = assembler.layer(index)
        for linear, parts in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.output, ("self_attn.o_proj",)),
            (layer.mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.mlp.down, ("mlp.down_proj",)),
        ):
            assert torch.equal(linear.weight, torch.cat([source.read(f"{prefix}{part}.weight") for part in parts]))
    assert sum(assembler.treated.values()) == 14 and all(how.startswith("kept in ") for how in assembler.treated)
