from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from diptych.kernels import Linear

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (61, 160), (7, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_product(dtype: torch.dtype, rows: int, columns: int, biased: bool) -> None:
    weight, bias = torch.randn(rows, columns).to(dtype), torch.randn(rows).to(dtype) if biased else None
    x = torch.randn(9, columns).to(dtype)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = {"rtol": 0.01, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(Linear(weight, bias)(x).double(), expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_unpacks_exactly(dtype: torch.dtype) -> None:
    weight = torch.randn(963, 577).to(dtype)
    assert torch.equal(Linear(weight.clone()).weight, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 1536), (2048, 640)])
def test_a_row_is_the_same_in_every_batch(dtype: torch.dtype, rows: int, columns: int) -> None:
    linear = Linear(torch.randn(rows, columns).to(dtype))
    if not linear.packed:
        pytest.skip("this torch has no oneDNN")
    x = torch.randn(300, columns).to(dtype)
    everything = linear(x)
    for count in (1, 2, 3, 8, 31, 33, 64, 299):
        assert torch.equal(linear(x[:count].contiguous()), everything[:count]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    assert Linear(torch.randn(32, 16).to(dtype))(torch.empty(0, 16, dtype=dtype)).shape == (0, 32)
