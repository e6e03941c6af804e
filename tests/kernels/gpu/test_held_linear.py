"""Products with quantised weights in Triton, beside those with the floats that they stand for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.models.load import load_model
from common.engine.run.kernel_check import product_checks
from kernels import QuantisedWeight
from kernels.backends import FOUND
from kernels.gpu.products import held_linear as module
from kernels.gpu.products.held_linear import LEAST_BLOCKS, MOST_ROWS, held_linear, num_splits, widened_weight
from kernels.interface.held_weight import HeldWeight
from kernels.interface.quantised_weight import E2M1
from kernels.plain import backend as torch_backend

from ...common.engine.models.generation import Pool, files_of, prompt, random_checkpoint
from ...common.engine.weights.formats.checkpoints import FORMATS, write_checkpoint
from ...stand_in import StandIn
from .compiled import CHIPS, Job, Target, compile_kernels
from .conftest import ON_GPU
from .quantised_weights import KINDS, held_on, weight_of

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.slow_except("fp8 by row-dtype0")
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_with_the_floats(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Outputs that fill no tile; rows of a narrow tile, of a wide one, of two, and of a step that widens the matrix."""
    weight = weight_of(kind, 100, 256)
    held, floats = held_on(device, weight), weight.dense(dtype)
    assert torch.equal(held.dense(dtype).cpu(), floats)
    bias = torch.randn(100).to(dtype)
    for rows in (1, 40, 90, MOST_ROWS + 6):
        x = torch.randn(rows, 256).to(dtype)
        for given, wide in ((bias, False), (None, True)):
            found = held_linear(x.to(device), held, None if given is None else given.to(device), wide=wide)
            assert found.dtype == (torch.float32 if wide else dtype)
            expected = x.double() @ floats.double().T + (0.0 if given is None else given.double())
            torch.testing.assert_close(found.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.quick_cover(1)
@pytest.mark.slow_cases("Q4_K-*", "Q6_K-*")
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_widened_matrix_has_the_bits_of_the_floats(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    weight = weight_of(kind, 37, 512)
    assert torch.equal(widened_weight(held_on(device, weight), dtype).cpu(), weight.dense(dtype))


@pytest.mark.interpret
def test_every_4_bit_float_by_every_scale(device: torch.device) -> None:
    """From 2^-126 on: the interpreter, unlike a chip, reads 2^-127 in bfloat16 as zero."""
    exponents = torch.arange(-126, 126)[:, None]
    numbers = torch.arange(16, dtype=torch.uint8).repeat(len(exponents), 2)
    scale = torch.ldexp(torch.ones(exponents.shape), exponents)
    weight = QuantisedWeight(4, 32, numbers, scale.bfloat16(), None)
    expected = (torch.tensor(E2M1) * scale).repeat(1, 2)
    assert torch.equal(weight.dense(torch.float32), expected)
    assert torch.equal(widened_weight(held_on(device, weight), torch.float32).cpu(), expected)


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.parametrize("kind", ["int4", "fp8 by row"])
def test_a_row_has_the_same_bits_alone_and_among_others(device: torch.device, kind: str) -> None:
    """Also where the inputs are cut: how often does not depend on the rows."""
    inputs = 4 * module.BLOCK_K * LEAST_BLOCKS
    held = held_on(device, weight_of(kind, 40, inputs))
    assert num_splits(40, inputs) == 4
    x = torch.randn(33, inputs).to(device)
    bias = torch.randn(40).to(device)
    together = held_linear(x, held, bias)
    for rows in (1, 7):
        assert torch.equal(held_linear(x[:rows], held, bias), together[:rows])
    expected = x.double() @ held.dense(torch.float32).double().T + bias.double()
    torch.testing.assert_close(together.double(), expected, rtol=2e-5, atol=2e-5)


def test_no_rows(device: torch.device) -> None:
    held = held_on(device, weight_of("int8", 20, 64))
    assert held_linear(torch.empty(0, 64, device=device), held, None).shape == (0, 20)


def test_how_often_inputs_are_cut() -> None:
    """Llama 3.1 8B's matrices of 8 bits: its q and down, its gate and up, its head; and a small one."""
    assert [num_splits(*shape) for shape in ((4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096))] == [
        8,
        8,
        2,
        1,
    ]
    assert num_splits(64, 256) == 1


def test_memory_is_that_of_the_numbers() -> None:
    numbers = 256 * 1024
    sizes = {kind: HeldWeight.of(weight_of(kind, 256, 1024)).num_bytes * 8 / numbers for kind in KINDS}
    assert sizes == pytest.approx(
        {"int8": 8.25, "int4": 5.0, "Q4_K": 6.0, "Q6_K": 12.0, "fp8 by block": 8.5, "fp8 by row": 8.03125, "mxfp4": 4.5}
    )


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="the tensors are the CPU's")
@pytest.mark.parametrize("name", ["awq", "gptq int8"])
def test_a_checkpoint_is_held_and_answers_as_its_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = random_checkpoint(tmp_path / "plain", "Llama", hidden_size=96, num_hidden_layers=2)
    dense = write_checkpoint(plain, tmp_path / "held", FORMATS[name])
    expected = Pool(load_model(files_of(dense))).greedy(prompt(20), 4)
    counted: list[int] = []

    def counting(x: Tensor, *rest: object, **named: object) -> Tensor:
        counted.append(x.shape[0])
        return held_linear(x, *rest, **named)  # type: ignore[arg-type]

    def multiply_by(kernel: Any) -> None:
        products = SimpleNamespace(held_linear=kernel)
        monkeypatch.setitem(FOUND, "cpu", StandIn(torch_backend, products=products))

    multiply_by(counting)
    model = load_model(files_of(tmp_path / "held"), quantization="auto")
    assert Pool(model).greedy(prompt(20), 4, chunk=12) == expected
    assert len(counted) == 4 * 2 * 5  # matrices, layers, steps
    assert not model.weights.layers[0].qkv.packed
    checks = [check() for check in product_checks(model, torch.device("cpu"))]
    assert len(checks) == 4 and not any(finding.problem for finding in checks)
    multiply_by(lambda *a, **k: held_linear(*a, **k) * 1.1)
    broken = load_model(files_of(tmp_path / "held"), quantization="auto")
    found = [check() for check in product_checks(broken, torch.device("cpu"))]
    assert len(found) == 4 and all(finding.problem and "quantised product" in str(finding) for finding in found)


def held_jobs(capability: Target) -> list[Job]:
    """Llama 3.1 8B's gate and up in 4 bits and in fp8, by few rows and by many."""
    jobs = []
    for packed, rows in ((True, 16), (True, 64), (False, 16), (False, 64)):
        factor = "*fp16" if packed else "*fp32"
        constants = {
            **{"N": 28672, "K": 4096, "HEADS": 1, "WIDTH": 4096, "GROUP": 128, "SPLITS": 2, "WHOLE": False},
            **{"PACKED": packed, "FLOATS": not packed},
            **{"OFFSET": packed, "BIAS": False, "bias": None},
            **{"BLOCK_M": rows, "BLOCK_N": module.BLOCK_N, "BLOCK_K": module.BLOCK_K // (2 if packed else 1)},
            **({} if packed else {"offset": None}),
        }
        kinds = {"x": "*bf16", "numbers": "*u8", "scale": factor, "offset": factor, "bias": "*bf16", "out": "*fp32"}
        signature = kinds | {"num_rows": "i32"}
        tile = module.Tile(rows, module.BLOCK_N, module.BLOCK_K)
        stages = module.stages_on(CHIPS[capability], tile)
        name = "kernels.gpu.products.held_linear:multiply_held"
        jobs.append(Job(name, signature, constants, capability, tile.warps, stages))
    return jobs


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled(capability: Target) -> None:
    """On tensor cores, without spills."""
    for found in compile_kernels(held_jobs(capability)):
        assert found.spills == 0
        assert found.shared_bytes <= CHIPS[capability].shared_bytes
        assert "HMMA" in found.sass or "HGMMA" in found.sass
