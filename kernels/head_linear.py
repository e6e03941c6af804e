"""Per-head matrix products, which map queries to latents, and sums of latents to values."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends import backend
from kernels.cpu.recorder import Slot
from kernels.linear import Linear


class HeadLinear:
    """y[h] = x[h] W[h]^T for each head h, of W [heads, out, in] in the model's dtype.

    On a CPU, each head's weights are packed as in `Linear`, and results do not depend on the batch. On a GPU with
    kernels, `batch_invariant` has the same effect.
    """

    def __init__(self, weight: Tensor, *, batch_invariant: bool = False) -> None:
        self.num_heads, self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        found = backend(weight.device.type)
        self._packing, self._products = found.packing, found.products if batch_invariant else None
        self._stacked: Tensor | None = None
        self.heads: list[Linear] = []
        if self._products is not None:
            self._stacked = weight.contiguous()
        elif weight.device.type == "cpu":
            self.heads = [Linear(one.contiguous()) for one in weight]
        else:
            self._stacked = weight.transpose(1, 2).contiguous()  # [heads, in, out]
        self._packed = [head.native for head in self.heads if head.native is not None]

    @property
    def by_device(self) -> bool:
        """Whether the device kernels perform the product."""
        return self._products is not None

    @property
    def weight(self) -> Tensor:
        """Weights [heads, out, in]. Only available if `by_device`."""
        assert self.by_device and self._stacked is not None
        return self._stacked

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply the first `in` of each head's n elements of x [T, heads * n]. Returns [T, heads * out]."""
        if isinstance(x, Slot):
            return x.recorder.head_linear(x, self._packed, self.num_heads)
        if self._products is not None and self._stacked is not None:
            return self._products.invariant_linear(x, self._stacked, None)
        if self.heads and len(self._packed) == self.num_heads and self._packing is not None:
            return self._packing.head_linear(x, self._packed)
        parts = x.view(len(x), self.num_heads, x.shape[1] // self.num_heads)[..., : self.in_features]
        if self._stacked is not None:
            return torch.bmm(parts.transpose(0, 1), self._stacked).transpose(0, 1).flatten(1)
        return torch.cat([head(parts[:, i].contiguous()) for i, head in enumerate(self.heads)], dim=1)
