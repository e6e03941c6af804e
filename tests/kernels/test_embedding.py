from __future__ import annotations

import pytest
import torch

from kernels import Embedding, KVLayout, Linear, QuerySpan, plan_attention, quantise, record, rms_norm
from kernels.cpu.backend import native_backend

DTYPES = [torch.float32, torch.bfloat16]
IDS = torch.tensor([0, 1, 31, 32, 95, 99, 7, 99])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_plain_table(dtype: torch.dtype) -> None:
    table = torch.randn(100, 48).to(dtype)
    embedding = Embedding(table)
    assert embedding.weight is table
    assert torch.equal(embedding(IDS), table[IDS])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_the_head_holds(dtype: torch.dtype) -> None:
    table = torch.randn(100, 48).to(dtype)
    embedding = Embedding.tied(table.clone(), Linear(table))
    assert torch.equal(embedding.weight, table)
    assert torch.equal(embedding(IDS), table[IDS])
    assert embedding.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_is_held_once(dtype: torch.dtype) -> None:
    native = native_backend()
    if native is None or (dtype == torch.bfloat16 and not native.multiplies_bf16):
        pytest.skip("the head is not packed here")
    table = torch.randn(100, 48).to(dtype)
    embedding = Embedding.tied(table, Linear(table))
    table.zero_()
    assert embedding.weight.count_nonzero() > 0


def test_a_quantised_head_is_no_table() -> None:
    table = torch.randn(96, 64)
    codes = quantise(table, 8)
    assert codes is not None
    assert torch.equal(Embedding.tied(table, Linear(codes, dtype=torch.float32)).weight, table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 6.9375])
def test_recorded(dtype: torch.dtype, scale: float) -> None:
    table, norm = torch.randn(100, 48).to(dtype), torch.ones(48)
    embedding, head = Embedding.tied(table.clone(), Linear(table)), Linear(table)
    if head.native is None:
        pytest.skip("the head is not packed here")
    program = record(dtype, lambda step: head(rms_norm(embedding.record(step, scale), norm, 1e-6), wide=True))
    assert program is not None
    plan = plan_attention([QuerySpan(0, 8, 0, [0])], KVLayout(1, 1, 1, 16, 16), 1, torch.device("cpu"))
    place = torch.arange(8)
    logits, _ = program.run(IDS, place, place, None, torch.zeros(1, 1, 1, 16, 2, 16, dtype=dtype), plan)
    assert torch.equal(logits, head(rms_norm(table[IDS] * scale, norm, 1e-6), wide=True))
