"""Products of which a row has the same bits in every batch, and models whose rows have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.engine.run.kernel_check import expert_checks, product_checks
from common.engine.run.runner import ModelRunner
from kernels.agreement.gate import Poisoned
from kernels.backends import FOUND
from kernels.gpu import backend as triton_backend
from kernels.gpu import held_products
from kernels.gpu.products import invariant
from kernels.gpu.products.experts import MANY_ROWS, experts
from kernels.gpu.products.held_linear import LEAST_BLOCKS, MOST_ROWS, Tile, num_splits, stages_on
from kernels.gpu.products.invariant import DENSE, DENSE_MANY, FLOAT32, HELD, invariant_linear
from kernels.gpu.products.lora import add_lora
from kernels.interface.lora import GroupedRows, LoraStack

from ...common.engine.models.generation import files_of, prompt, random_checkpoint
from ...families import CASES
from .compiled import CHIPS, Compiled, Job, Target, compile_kernels
from .conftest import ON_GPU
from .quantised_weights import held_on, weight_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COUNTS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 100)
ROWS = sum(COUNTS)
"""More than those from which a program takes other tiles."""
CUT = 4 * 64 * LEAST_BLOCKS + 8
"""Inputs that are cut into splits, of which the last one is shorter."""


def same_apart(multiply: Callable[..., Tensor], *inputs: Tensor, counts: Sequence[int] = COUNTS) -> Tensor:
    """The product of all rows, whose bits they have in batches of each size as well, wherever they stand in these.

    Of products in float32: rounding to fewer bits would hide nearly all differences.
    """
    rows = len(inputs[0])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(5)).to(inputs[0].device)
    pieces = [*order.split(list(counts)), torch.arange(rows - MOST_ROWS - 1, rows, device=order.device).clamp(min=0)]
    with Poisoned():
        together = multiply(*inputs)
        for piece in pieces:
            assert torch.equal(multiply(*(one[piece] for one in inputs)), together[piece]), len(piece)
    return together


@pytest.mark.slow_except("1-33-torch.bfloat16")
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 90), (129, 64), (1, 33), (40, CUT)])
def test_floats(device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Outputs and inputs that fill no tile, and inputs that are cut."""
    assert num_splits(outputs, inputs) == (4 if inputs == CUT else 1)
    assert ROWS > MOST_ROWS
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(device, dtype)
    bias, x = torch.randn(outputs).to(device, dtype), torch.randn(ROWS, inputs).to(device, dtype)
    found = same_apart(lambda rows: invariant_linear(rows, weight, bias, wide=True), x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T + bias.double(), rtol=2e-5, atol=2e-5)
    assert torch.equal(invariant_linear(x[:3], weight, bias), found[:3].to(dtype))


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8 by row"])
def test_quantised_weights(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Also above the number of rows from which the matrix would else be widened first."""
    weight = weight_of(kind, 70, 128)
    held, x = held_on(device, weight), torch.randn(ROWS, 128).to(device, dtype)
    found = same_apart(lambda rows: invariant_linear(rows, held, None, wide=True), x)
    expected = x.double().cpu() @ weight.dense(dtype).double().T
    torch.testing.assert_close(found.double().cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_of_heads(device: torch.device, dtype: torch.dtype) -> None:
    """Each head's own columns, of which the last ones are not read."""
    heads, each, inputs, outputs = 3, 84, 80, 70
    weight = (torch.randn(heads, outputs, inputs) / inputs**0.5).to(device, dtype)
    x = torch.randn(ROWS, heads * each).to(device, dtype)
    x.view(ROWS, heads, each)[..., inputs:] = float("nan")
    found = same_apart(lambda rows: invariant_linear(rows, weight, None, wide=True), x)
    read = x.view(ROWS, heads, each)[..., :inputs].double()
    expected = torch.einsum("rhi,hoi->rho", read, weight.double()).flatten(1)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.interpret
def test_experts_and_adapters_take_one_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of rows: with fewer rows Hopper's tensor cores have another instruction."""
    for room in ("experts", "lora"):
        monkeypatch.setattr(f"kernels.gpu.products.{room}.rows_of_tile", lambda *_: pytest.fail("chosen by the rows"))
    counts, hidden, inner = (1, 2, 17), 32, 24
    rows = sum(counts)
    x, shares = torch.randn(rows, hidden).to(device, torch.bfloat16), torch.rand(rows, 2).to(device)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(rows)]).to(device)
    weights = [torch.randn(*size).to(device, torch.bfloat16) for size in ((4, 2 * inner, hidden), (4, hidden, inner))]

    def mixed(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return experts(x, chosen, shares, *weights, None, None, "silu", True)

    same_apart(mixed, x, chosen, shares, counts=counts)
    stack = LoraStack.empty(hidden, (32,), 2, 16, torch.bfloat16, device)
    for place in range(2):
        stack.set(place, [(0, torch.randn(8, hidden), torch.randn(32, 8))])

    def changed(x: Tensor, places: Tensor) -> Tensor:
        y = torch.ones(len(x), 32, device=device, dtype=torch.bfloat16)
        add_lora(x, y, stack, GroupedRows.of(places, 2), batch_invariant=True)
        return y

    same_apart(changed, x, torch.randint(-1, 2, (rows,)).to(device), counts=counts)


def test_no_rows(device: torch.device) -> None:
    assert invariant_linear(torch.empty(0, 64, device=device), torch.ones(20, 64, device=device), None).shape == (0, 20)


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU go through Triton's kernels, as a GPU's do, and no product through torch."""
    monkeypatch.setitem(FOUND, "cpu", triton_backend)
    for place, product in ((functional, "linear"), (torch, "bmm"), (torch.ops.mkldnn, "_linear_pointwise")):
        monkeypatch.setattr(place, product, lambda *_: pytest.fail("a product that is torch's"))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    **{name: CASES[name] for name in ("mixtral", "deepseek-v3") if name in CASES},
}


def logits_of(model: Decoder, batches: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each sequence: of its prompt, and of a row behind it. Those of a batch share their steps."""
    runner = ModelRunner(model, KVCache(model.config, 8, 16, model.dtype))
    prompts = [SequenceChunk(prompt(9 + i, seed=i), 0, (2 * i, 2 * i + 1)) for i in range(4)]
    rows = [SequenceChunk((7 + i,), 9 + i, one.block_table) for i, one in enumerate(prompts)]
    found = [list[Tensor]() for _ in prompts]
    for step in (prompts, rows):
        for batch in batches:
            for i, logits in zip(batch, runner.forward([step[i] for i in batch]), strict=True):
                found[i].append(logits)
    return [torch.stack(each) for each in found]


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="the tensors are the CPU's")
@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("name", MODELS)
def test_a_models_logits_are_the_same_in_every_batch(tmp_path: Path, name: str) -> None:
    """In bfloat16; no product of its steps is torch's, and the check of a start takes each kind of them."""
    family, options = MODELS[name]
    folder = random_checkpoint(tmp_path, family, **{"num_hidden_layers": 2, **options})
    model = load_model(files_of(folder), dtype="bfloat16", batch_invariant=True)
    alone = logits_of(model, [[0], [1], [2], [3]])
    for batches in ([[0, 1, 2, 3]], [[3, 1], [2, 0]]):
        assert all(map(torch.equal, logits_of(model, batches), alone)), batches
    assert all(bool(one.isfinite().all()) for one in alone)


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="the tensors are the CPU's")
@pytest.mark.usefixtures("triton_everywhere")
def test_the_check_of_a_start_sees_other_numbers_and_other_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "hidden_size": 32}
    folder = random_checkpoint(tmp_path, "Llama", **options, num_key_value_heads=1, vocab_size=40)
    model = load_model(files_of(folder), dtype="bfloat16", batch_invariant=True)

    def problems() -> list[str]:
        checks = [*product_checks(model, torch.device("cpu")), *expert_checks(model, torch.device("cpu"))]
        return [str(found) for found in (check() for check in checks) if found.problem]

    assert len(list(product_checks(model, torch.device("cpu")))) == 5  # the head's as well
    assert problems() == []
    right = held_products.invariant_linear

    def off(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return right(x, *rest, **named) * 1.1

    def by_the_rows(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return right(x, *rest, **named) * (1.0 + (len(x) == 17) / 256)

    monkeypatch.setattr(held_products, "invariant_linear", off)
    assert len(found := problems()) == 5 and all("off by" in one for one in found)
    monkeypatch.setattr(held_products, "invariant_linear", by_the_rows)
    assert len(found := problems()) == 5 and all("of 17 rows have other bits apart" in one for one in found)


@pytest.mark.slow
@pytest.mark.interpret
def test_inputs_in_another_order_are_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `same_apart` would find if a tile of many rows took its inputs otherwise."""
    monkeypatch.setattr(invariant, "DENSE_MANY", DENSE_MANY._replace(inputs=16))
    weight, x = torch.randn(70, 90).to(device, torch.bfloat16), torch.randn(ROWS, 90).to(device, torch.bfloat16)
    with pytest.raises(AssertionError):
        same_apart(lambda rows: invariant_linear(rows, weight, None, wide=True), x)


KINDS = {"scale": "*fp32", "offset": "*fp32", "bias": "*bf16", "num_rows": "i32"}
SHAPES = {"8B down": (4096, 14336), "70B gate and up": (57344, 8192), "head": (128256, 4096)}
MMA = re.compile(r"\b(?:wgmma\.mma_async|mma)\.sync\.\S+")


def dense_job(shape: tuple[int, int], tile: Tile, capability: Target, kind: str = "bf16") -> Job:
    outputs, inputs = shape
    splits, whole = num_splits(outputs, inputs), tile is DENSE_MANY
    constants = {
        **{"N": outputs, "K": inputs, "HEADS": 1, "WIDTH": inputs, "GROUP": 0, "SPLITS": splits, "WHOLE": whole},
        **dict.fromkeys(("PACKED", "FLOATS", "OFFSET", "BIAS"), False),
        **dict.fromkeys(("scale", "offset", "bias")),
        **{"BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs},
    }
    out = f"*{kind}" if whole or splits == 1 else "*fp32"
    signature = {"x": f"*{kind}", "numbers": f"*{kind}", **KINDS, "out": out}
    name = "kernels.gpu.products.held_linear:multiply_held"
    return Job(name, signature, constants, capability, tile.warps, stages_on(CHIPS[capability], tile))


def instructions(found: Compiled) -> set[str]:
    """The tensor core instructions of a kernel, with their sizes and types."""
    return set(MMA.findall(found.ptx))


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_and_many_rows_are_multiplied_by_the_same_instruction(shape: str, capability: int) -> None:
    """So a row's sum is the same chain of them, where nothing but the numbers of tiles and warps differs."""
    few, many = compile_kernels([dense_job(SHAPES[shape], tile, capability) for tile in (DENSE, DENSE_MANY)])
    assert len(instructions(few)) == 1 and instructions(few) == instructions(many)
    for found in (few, many):
        assert found.spills == 0
        assert found.shared_bytes <= CHIPS[capability].shared_bytes
        assert ("HGMMA" if capability >= 90 else "HMMA") in found.sass
        assert "LDGSTS" in found.sass, "weights are not copied ahead"


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(600)
def test_float32_is_multiplied_as_such() -> None:
    (found,) = compile_kernels([dense_job(SHAPES["8B down"], FLOAT32, 90, "fp32")])
    assert "FFMA" in found.sass and not instructions(found)
    assert found.spills == 0


def test_tiles_have_the_rows_of_one_instruction() -> None:
    """Those of experts, adapters and quantised weights never change; those of floats take the same inputs at a time."""
    assert DENSE.rows == HELD.rows == MANY_ROWS == 64 and DENSE_MANY.rows % 64 == 0
    assert (DENSE.outputs, DENSE.inputs) == (DENSE_MANY.outputs, DENSE_MANY.inputs)
