from __future__ import annotations

import pytest
import torch

from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.plain import reference

pytestmark = pytest.mark.interpret
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 63), (33, 80), (5, 500), (7, 576), (3, 5000)])
def test_norm(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, width).to(dtype) * 3, torch.rand(width) + 0.5
    out = rms_norm(x.to(device), weight.to(device), 1e-5)
    assert out.dtype == dtype
    close(out, reference.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (33, 80), (4, 4096)])
def test_sum_and_norm(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    x, delta, weight = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype), torch.rand(width)
    total, out = add_rms_norm(x.to(device), delta.to(device), weight.to(device), 1e-6)
    assert torch.equal(total.cpu(), x + delta)
    close(out, reference.rms_norm((x + delta).double(), weight.double(), 1e-6))


def test_a_view_with_gaps(device: torch.device) -> None:
    """The queries of a fused projection, whose heads are normalised."""
    x, weight = torch.randn(5, 6, 64), torch.rand(64)
    out = rms_norm(x.to(device)[:, 1:3], weight.to(device), 1e-6)
    close(out, reference.rms_norm(x[:, 1:3].double(), weight.double(), 1e-6))
    wide = torch.randn(64, 9)
    total, _ = add_rms_norm(wide.to(device).T, wide.to(device)[:, :].T, weight.to(device), 1e-6)
    assert torch.equal(total.cpu(), (wide + wide).T)


def test_nothing(device: torch.device) -> None:
    x, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    assert rms_norm(x, weight, 1e-6).shape == add_rms_norm(x, x, weight, 1e-6)[1].shape == (0, 64)


@pytest.mark.parametrize("width", [80, 576])
def test_a_row_is_the_same_in_every_batch(device: torch.device, width: int) -> None:
    x, weight = torch.randn(40, width, device=device), torch.rand(width, device=device)
    together = rms_norm(x, weight, 1e-6)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-6)[0], together[i]) for i in range(0, 40, 7))


def test_large_numbers_are_squared_in_float32(device: torch.device) -> None:
    """Squares that float16 cannot hold."""
    x = torch.full((1, 64), 3e4, dtype=torch.float16, device=device)
    torch.testing.assert_close(rms_norm(x, torch.ones(64, device=device), 1e-6), torch.ones_like(x))
