"""Adapters' grouped products in Triton against float64, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.gpu.products.experts import BLOCK_N, FEW_ROWS, MANY_ROWS
from kernels.gpu.products.lora import add_lora, columns_of_tile
from kernels.interface.lora import GroupedRows, LoraStack

from .compiled import CHIPS, Job, Target, compile_kernels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
Part = tuple[int, Tensor, Tensor]


def adapters_of(parts: Sequence[int], width: int, ranks: Sequence[int]) -> list[list[Part]]:
    """Random adapters, of one rank each; the second changes the last part alone."""
    return [
        [
            (number, torch.randn(rank, width) / width**0.5, torch.randn(outputs, rank) / rank**0.5)
            for number, outputs in enumerate(parts)
            if i != 1 or number == len(parts) - 1
        ]
        for i, rank in enumerate(ranks)
    ]


def exact(x: Tensor, y: Tensor, places: Tensor, held: list[list[Part]], parts: Sequence[int]) -> Tensor:
    """Row by row, in float64, of weights as the stack holds them."""
    out = y.double()
    for row, place in enumerate(places.tolist()):
        for number, a, b in held[place] if place >= 0 else ():
            first = sum(parts[:number])
            low = a.to(x.dtype).double() @ x[row].double()
            out[row, first : first + parts[number]] += b.to(x.dtype).double() @ low
    return out


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "parts", "width", "ranks"),
    [
        (1, (64,), 80, (4, 4)),
        pytest.param(21, (64, 32, 32), 80, (5, 16, 1), marks=pytest.mark.slow),
        (70, (36,), 36, (16, 3)),
        pytest.param(9, (48, 48), 64, (3, 8), marks=pytest.mark.slow),
    ],
)
def test_rows_get_what_their_adapter_makes(
    device: torch.device, rows: int, parts: tuple[int, ...], width: int, ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    held = adapters_of(parts, width, ranks)
    stack = LoraStack.empty(width, parts, len(held) + 1, 16, dtype, device)
    for place, adapter in enumerate(held):
        stack.set(place, adapter)
    x, y = torch.randn(rows, width).to(dtype), torch.randn(rows, sum(parts)).to(dtype)
    places = torch.randint(-1, len(held), (rows,))
    places[0] = 0
    found = y.clone().to(device)
    add_lora(x.to(device), found, stack, GroupedRows.of(places.to(device), len(held) + 1))
    found = found.cpu()
    expected = exact(x, y, places, held, parts)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(found[places < 0], y[places < 0]), "rows without an adapter change"


@pytest.mark.interpret
def test_a_place_that_is_set_again_holds_nothing_of_what_was_there(device: torch.device) -> None:
    first, second = adapters_of((32, 32), 64, (16, 2))
    used, fresh = (LoraStack.empty(64, (32, 32), 1, 16, torch.float32, device) for _ in range(2))
    used.set(0, first)
    used.set(0, second)
    fresh.set(0, second)
    assert torch.equal(used.a, fresh.a) and torch.equal(used.b, fresh.b)


@pytest.mark.interpret
def test_no_rows_and_rows_without_adapters(device: torch.device) -> None:
    stack = LoraStack.empty(16, (16,), 2, 16, torch.float32, device)
    stack.set(0, [(0, torch.ones(1, 16), torch.ones(16, 1))])
    for rows in (0, 5):
        y, places = torch.ones(rows, 16, device=device), torch.full((rows,), -1, device=device)
        add_lora(torch.ones(rows, 16, device=device), y, stack, GroupedRows.of(places, 2))
        assert torch.equal(y, torch.ones_like(y))


def test_no_tile_of_columns_has_outputs_of_two_parts() -> None:
    assert [columns_of_tile(begins) for begins in ([], [64], [4096, 5120], [48, 64], [96])] == [64, 64, 64, 16, 32]


def lora_jobs(capability: Target, rows: int) -> list[Job]:
    """Llama-3.1-8B's q, k and v with eight adapters of rank 64."""
    grouped = {"order": "*i32", "ends": "*i32"}
    shrink = Job(
        "kernels.gpu.products.experts:multiply_grouped",
        {**dict.fromkeys(("x", "weights", "scale", "offset", "bias", "out"), "*bf16"), **grouped, "num_pairs": "i32"},
        {
            **{"EXPERTS": 8, "PER_TOKEN": 1, "N": 192, "K": 4096, "GATHER": True, "BIAS": False, "bias": None},
            **{"GROUP": 0, "PACKED": False, "FLOATS": False, "OFFSET": False, "scale": None, "offset": None},
            **{"BLOCK_E": 8, "BLOCK_M": rows, "BLOCK_N": BLOCK_N, "BLOCK_K": 64},
        },
        *(capability, 4, 3),
    )
    expand = Job(
        "kernels.gpu.products.lora:expand_grouped",
        {**dict.fromkeys(("low", "weights", "out"), "*bf16"), **grouped, "num_rows": "i32"},
        {
            **{"LORAS": 8, "N": 6144, "RANK": 64, "PARTS": 3, "SECOND": 4096, "THIRD": 5120},
            **{"BLOCK_L": 8, "BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_R": 64},
        },
        *(capability, 4, 2),
    )
    return [shrink, expand]


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_compiled(capability: Target, rows: int) -> None:
    """On tensor cores, without spills."""
    for found in compile_kernels(lora_jobs(capability, rows)):
        assert found.spills == 0
        assert found.shared_bytes <= CHIPS[capability].shared_bytes
        assert "HMMA" in found.sass or "HGMMA" in found.sass
