"""A matrix product with fixed weights, kept in the layout that the device multiplies fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PACKED_FOR_ROWS = 32  # any number serves all batch sizes; this one picks oneDNN's blocked layout


class Linear:
    """y = x W^T + b for W [out, in] in the model's dtype.

    On a CPU with oneDNN the weights are packed: small batches run up to twice as fast, and a row's result is the same
    in every batch. The packed copy is all that is kept; `weight` unpacks it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias, self.dtype = bias, weight.dtype
        self._packed = _pack(weight)
        self._plain = weight if self._packed is None else weight.new_empty(0)
        # One row alone takes oneDNN's other kernel in float32, and sums in another order, by threads, where W is wide.
        self._lone_row_differs = weight.dtype == torch.float32 or self.in_features > self.out_features

    @property
    def packed(self) -> bool:
        return self._packed is not None

    @property
    def weight(self) -> Tensor:
        """W as it was given; a copy when packed. For references, not for speed."""
        if self._packed is None:
            return self._plain
        dense: Tensor = self._packed.to_dense()
        return dense.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] to [T, out]."""
        if self._packed is None:
            return functional.linear(x, self._plain, self.bias)
        if x.shape[0] == 1 and self._lone_row_differs:
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


def _pack(weight: Tensor) -> Any:
    """oneDNN's blocked copy of W, or None where this torch or this device has none."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    except (AttributeError, RuntimeError):  # built without oneDNN
        return None
