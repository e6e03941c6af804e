"""Grouped products in Triton against float64, expert by expert."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.models.load import load_model
from common.engine.run.kernel_check import expert_checks
from common.engine.weights.safetensors_weights import QuantisedSafetensors
from kernels.backends import FOUND
from kernels.gpu.products.experts import BLOCK_K, BLOCK_N, FEW_ROWS, MANY_ROWS, experts, rows_of_tile
from kernels.interface.held_weight import HeldWeight
from kernels.plain import backend as torch_backend
from kernels.plain import reference

from ...common.engine.models.generation import Pool, files_of, prompt
from ...common.engine.models.mxfp4_checkpoint import write_mxfp4
from ...stand_in import StandIn
from .compiled import CHIPS, Job, Target, compile_kernels
from .conftest import ON_GPU
from .quantised_weights import KINDS, weight_of

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SIGNATURE = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **{"scale": "*bf16", "offset": "*bf16", "order": "*i32", "ends": "*i32", "num_pairs": "i32"},
}


def exact(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, biases: list[Tensor]) -> Tensor:
    """Row by row, in float64."""
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for row, (picked, parts) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True)):
        for expert, share in zip(picked, parts, strict=True):
            inner = x[row].double() @ gate_up[expert].double().T + biases[0][expert].double()
            made = reference.gated(inner[None], "silu")[0] @ down[expert].double().T + biases[1][expert].double()
            out[row] += share * made
    return out


@pytest.mark.slow_except("37-3-1-dtype0")
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "count", "per_token"), [(1, 5, 2), (37, 3, 1), (70, 4, 3)])
def test_experts(device: torch.device, rows: int, count: int, per_token: int, dtype: torch.dtype) -> None:
    hidden, inner = 80, 36
    x, chosen = (
        torch.randn(rows, hidden).to(dtype),
        torch.stack([torch.randperm(count)[:per_token] for _ in range(rows)]),
    )
    chosen[chosen == 1] = 0 if per_token == 1 else 1  # in one case an expert has no rows
    shares = torch.rand(rows, per_token)
    gate_up, down = torch.randn(count, 2 * inner, hidden) / 9, torch.randn(count, hidden, inner) / 6
    weights = [gate_up.to(dtype), down.to(dtype)]
    biases = [torch.randn(count, 2 * inner).to(dtype), torch.randn(count, hidden).to(dtype)]
    on_device = [t.to(device) for t in (x, chosen, shares, *weights, *biases)]
    found = experts(*on_device, "silu").cpu()
    expected = exact(x, chosen, shares, weights[0], weights[1], biases)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    alone = experts(*(t.to(device) for t in (x[:1], chosen[:1], shares[:1], *weights, *biases)), "silu").cpu()
    if dtype == torch.float32:
        torch.testing.assert_close(alone, found[:1], rtol=1e-6, atol=1e-6)


@pytest.mark.slow_except("fp8 by row-dtype0")
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_experts_are_those_of_their_floats(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Outputs that fill no tile; small tiles of rows, and large ones."""
    hidden, inner, count = 100, 256, 2
    gate_up = [weight_of(kind, 2 * inner, 256, seed) for seed in range(count)]
    down = [weight_of(kind, hidden, inner, 10 + seed) for seed in range(count)]
    stacks = [HeldWeight.stacked([one.map(lambda t: t.to(device)) for one in made]) for made in (gate_up, down)]
    floats = [torch.stack([one.dense(dtype) for one in made]) for made in (gate_up, down)]
    assert all(
        torch.equal(stack.part(i).dense(dtype).cpu(), dense[i])
        for stack, dense in zip(stacks, floats, strict=True)
        for i in range(count)
    )
    biases = [torch.randn(count, 2 * inner).to(dtype), torch.randn(count, hidden).to(dtype)]
    for rows in (3, FEW_ROWS * count + 2):
        x, shares = torch.randn(rows, 256).to(dtype), torch.rand(rows, 1)
        chosen = torch.randint(0, count, (rows, 1))
        found = experts(*(t.to(device) for t in (x, chosen, shares)), *stacks, *(b.to(device) for b in biases), "silu")
        dense = experts(*(t.to(device) for t in (x, chosen, shares, *floats, *biases)), "silu")
        torch.testing.assert_close(found, dense, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="the tensors are the CPU's")
def test_a_published_gpt_oss_keeps_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of all layers stay in 4 bits, and the tokens are those of the same numbers as floats."""
    dense, held = write_mxfp4(tmp_path)
    expected = Pool(load_model(files_of(dense))).greedy(prompt(20), 4)
    counted: list[int] = []

    def counting(x: Tensor, *rest: Any) -> Tensor:
        counted.append(x.shape[0])
        return experts(x, *rest)

    def loaded(kernel: Any) -> Any:
        products = SimpleNamespace(experts=kernel)
        monkeypatch.setitem(FOUND, "cpu", StandIn(torch_backend, products=products))
        return load_model(files_of(held), quantization="auto")

    read = QuantisedSafetensors.read_quantised  # as on a GPU
    monkeypatch.setattr(QuantisedSafetensors, "read_quantised", lambda self, name, **_: read(self, name, floats=True))
    model = loaded(counting)
    kinds = [layer.mlp.experts.kind for layer in model.weights.layers]
    assert set(kinds) == {"4-bit floats"}
    assert Pool(model).greedy(prompt(20), 4, chunk=12) == expected
    assert len(counted) == len(kinds) * 5  # steps
    (found,) = (check() for check in expert_checks(model, torch.device("cpu")))
    assert not found.problem and "4-bit floats" in str(found)
    broken = loaded(lambda *arguments: experts(*arguments) * 1.1)
    (found,) = (check() for check in expert_checks(broken, torch.device("cpu")))
    assert found.problem and "experts" in str(found)


@pytest.mark.interpret
def test_no_rows(device: torch.device) -> None:
    nothing = torch.empty(0, 2, dtype=torch.int64, device=device)
    weights = torch.ones(3, 8, 16, device=device), torch.ones(3, 16, 4, device=device)
    empty = torch.empty(0, 16, device=device)
    assert experts(empty, nothing, nothing.float(), *weights, None, None, "silu").shape == (0, 16)


def test_few_rows_take_small_tiles() -> None:
    assert rows_of_tile(8, 128) == FEW_ROWS and rows_of_tile(4096, 128) == MANY_ROWS


def dense_job(capability: Target, rows: int) -> Job:
    """Of Qwen3-30B-A3B."""
    signature = SIGNATURE | {"weights": "*bf16"}
    constants = {
        **{"EXPERTS": 128, "PER_TOKEN": 8, "N": 1536, "K": 2048, "GATHER": True, "BIAS": False, "bias": None},
        **{"GROUP": 0, "PACKED": False, "FLOATS": False, "OFFSET": False, "scale": None, "offset": None},
        **{"BLOCK_E": 128, "BLOCK_M": rows, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K},
    }
    return Job("kernels.gpu.products.experts:multiply_grouped", signature, constants, capability, 4, 3)


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_compiled(capability: int, rows: int) -> None:
    """On tensor cores, without spills, in shared memory that a chip has."""
    (found,) = compile_kernels([dense_job(capability, rows)])
    assert found.spills == 0
    assert found.shared_bytes <= CHIPS[capability].shared_bytes
    assert ("HGMMA" if capability >= 90 and rows >= 64 else "HMMA") in found.sass
    assert "LDGSTS" in found.sass, "weights are not copied ahead"


def held_jobs(capability: Target) -> list[Job]:
    """gpt-oss-20b's in 4-bit floats and Qwen3-30B-A3B's in fp8."""
    jobs = []
    for packed, rows in ((True, FEW_ROWS), (True, MANY_ROWS), (False, FEW_ROWS), (False, MANY_ROWS)):
        sizes = (32, 4, 5760, 2880, 32) if packed else (128, 8, 1536, 2048, 128)
        constants = {
            **dict(zip(("EXPERTS", "PER_TOKEN", "N", "K", "GROUP"), sizes, strict=True)),
            **{"GATHER": True, "BIAS": packed, "PACKED": packed, "FLOATS": True, "OFFSET": False, "offset": None},
            **{"BLOCK_E": sizes[0], "BLOCK_M": rows, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K // (2 if packed else 1)},
            **({} if packed else {"bias": None}),
        }
        signature = SIGNATURE | {"weights": "*u8", "scale": "*bf16" if packed else "*fp32"}
        jobs.append(Job("kernels.gpu.products.experts:multiply_grouped", signature, constants, capability, 4, 3))
    return jobs


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
def test_quantised_experts_compiled(capability: Target) -> None:
    """On tensor cores, without spills in the loop."""
    for found in compile_kernels(held_jobs(capability)):
        assert found.spills <= 2  # one register is put aside before the loop, and taken back behind it
        assert found.shared_bytes <= CHIPS[capability].shared_bytes
        assert "HMMA" in found.sass or "HGMMA" in found.sass
