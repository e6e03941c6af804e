from __future__ import annotations

import pytest
import torch

from kernels.gpu.tiles.activation import BLOCK, gated
from kernels.plain import reference

pytestmark = pytest.mark.interpret
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("width", [63, 80, BLOCK + 500])
def test_gated(device: torch.device, activation: str, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, 2 * width).to(dtype) * 4
    x[0, :4] = torch.tensor([-300.0, 300.0, -30.0, 0.0])
    found = gated(x.to(device), activation).cpu()
    tolerance = TOLERANCE[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), reference.gated(x.double(), activation), rtol=tolerance, atol=1e-5)


@pytest.mark.slow
def test_rows_with_gaps(device: torch.device) -> None:
    x = torch.randn(5, 3, 160)
    torch.testing.assert_close(gated(x.to(device)[:, 1], "silu").cpu(), reference.gated(x[:, 1], "silu"))
    torch.testing.assert_close(gated(x[0].to(device).T[:, :2], "silu").cpu(), reference.gated(x[0].T[:, :2], "silu"))


def test_nothing(device: torch.device) -> None:
    assert gated(torch.empty(0, 12, device=device), "silu").shape == (0, 6)


def test_an_unknown_activation(device: torch.device) -> None:
    with pytest.raises(ValueError, match="relu"):
        gated(torch.ones(1, 2, device=device), "relu")
