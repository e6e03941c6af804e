"""Grouped products in Triton against float64, expert by expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.products.experts import BLOCK_N, FEW_ROWS, MANY_ROWS, experts, rows_of_tile
from kernels.plain import reference

from .compiled import SHARED_BYTES_LIMIT, Job, compile_kernels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def exact(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, biases: list[Tensor]) -> Tensor:
    """Row by row, in float64."""
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for row, (picked, parts) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True)):
        for expert, share in zip(picked, parts, strict=True):
            inner = x[row].double() @ gate_up[expert].double().T + biases[0][expert].double()
            made = reference.gated(inner[None], "silu")[0] @ down[expert].double().T + biases[1][expert].double()
            out[row] += share * made
    return out


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


@pytest.mark.interpret
def test_no_rows(device: torch.device) -> None:
    nothing = torch.empty(0, 2, dtype=torch.int64, device=device)
    weights = torch.ones(3, 8, 16, device=device), torch.ones(3, 16, 4, device=device)
    empty = torch.empty(0, 16, device=device)
    assert experts(empty, nothing, nothing.float(), *weights, None, None, "silu").shape == (0, 16)


def test_few_rows_take_small_tiles() -> None:
    assert rows_of_tile(8, 128) == FEW_ROWS and rows_of_tile(4096, 128) == MANY_ROWS


@pytest.mark.cpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_compiled(capability: int, rows: int) -> None:
    """Qwen3-30B-A3B's: on tensor cores, without spills, in shared memory that a chip has."""
    signature = {
        **dict.fromkeys(("x", "weights", "bias", "out"), "*bf16"),
        **{"order": "*i32", "ends": "*i32", "num_pairs": "i32"},
    }
    constants = {
        **{"EXPERTS": 128, "PER_TOKEN": 8, "N": 1536, "K": 2048, "GATHER": True, "BIAS": False, "bias": None},
        **{"BLOCK_E": 128, "BLOCK_M": rows, "BLOCK_N": BLOCK_N, "BLOCK_K": 64},
    }
    job = Job("kernels.gpu.products.experts:multiply_grouped", signature, constants, capability, 4, 3)
    (found,) = compile_kernels([job])
    assert found.spills == 0
    assert found.shared_bytes <= SHARED_BYTES_LIMIT[capability]
    assert ("HGMMA" if capability >= 90 and rows >= 64 else "HMMA") in found.sass
    assert "LDGSTS" in found.sass, "weights are not copied ahead"
