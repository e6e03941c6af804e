"""A matrix product with fixed weights, kept in the layout that the device multiplies fastest."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import backend
from kernels.cpu.backend import NativeBackend
from kernels.cpu.packed import (
    FORMATS,
    PackedWeight,
    in_order,
    pack_12bit,
    pack_dense,
    pack_quantised,
    pack_widened,
    unpack,
)
from kernels.cpu.recorder import Slot
from kernels.dispatch import gated
from kernels.interface.held_weight import HeldWeight
from kernels.interface.quantised_weight import QuantisedWeight
from kernels.lora import LoraChange

# With AMX, oneDNN's summation order depends on the other rows (torch 2.13, Sapphire Rapids); with AVX-512 it does not.
# oneDNN reads this variable once, before its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

PACKED_FOR_ROWS = 32  # any number serves all batch sizes; this one picks oneDNN's blocked layout
Weight = Tensor | QuantisedWeight


class Linear:
    """y = x W^T + b for W [out, in] in the model's dtype, or quantised to 8 to 4 bits.

    On a CPU, weights are packed for the native kernels, or for oneDNN if these cannot be built, and results do not
    depend on the batch. Only the packed copy is kept; `weight` unpacks it. On a GPU with kernels, quantised weights
    stay quantised in `held` and are widened when read. Without kernels for them, they are dequantised to `dtype`. On a
    GPU, `batch_invariant` makes results independent of the batch, at the cost of slower products.
    """

    alternates: ClassVar[bool] = False
    """Whether packing interleaves the rows of both halves of W."""

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.batch_invariant = batch_invariant
        if isinstance(weight, Tensor):
            self.dtype = weight.dtype
        elif dtype is None:
            raise ValueError("quantised weights need the dtype of their inputs")
        else:
            self.dtype = dtype
        found = backend(_device_of(weight).type)
        self._packing, self._products = found.packing, found.products
        self.native = _packed(self._packing, weight, bias, self.dtype, self.alternates)
        self.bias = bias
        self._dense: Tensor | None = None
        self._onednn: Any = None
        self.held: HeldWeight | None = None
        if isinstance(weight, QuantisedWeight) and self._products is not None:
            self.held = HeldWeight.of(weight)
        if self.native is None and self.held is None:
            dense = weight if isinstance(weight, Tensor) else weight.dense(self.dtype)
            self._onednn = None if self.by_device else _pack(dense)
            self._dense = dense if self._onednn is None else None

    @property
    def by_device(self) -> bool:
        """Whether the device's own kernels multiply by it."""
        return self._products is not None and (self.held is not None or self.batch_invariant)

    @property
    def packed(self) -> bool:
        """Whether the weights are packed, so that a row's result is the same in every batch."""
        return self._dense is None and self.held is None

    @property
    def weight(self) -> Tensor:
        """W in the model's dtype; a copy when packed. For references, not for speed."""
        if self.native is not None and (packing := self._packing) is not None:
            if self.native.quantised:
                return unpack(self.native, self.dtype)
            return in_order(packing.unpack_rows(self.native, torch.arange(self.out_features), self.dtype), self.native)
        if self.held is not None:
            return self.held.dense(self.dtype)
        if self._dense is not None:
            return self._dense
        dense: Tensor = self._onednn.to_dense()
        return dense.contiguous()

    def __call__(self, x: Tensor, *, wide: bool = False, change: LoraChange | None = None) -> Tensor:
        """x [T, in] to [T, out]; float32 when `wide`, else x's dtype. A `change` of adapters is added, if not wide."""
        if change is not None:
            return change.add(x, self(x))
        if isinstance(x, Slot):
            return x.recorder.linear(x, self.native, self.out_features, "", wide)
        if self.native is not None and (packing := self._packing) is not None:
            return packing.linear(x, self.native, "", wide)
        return self._multiply(x, wide=wide)

    def _multiply(self, x: Tensor, *, wide: bool = False) -> Tensor:
        if self._products is not None:
            weight = self._dense if self.held is None else self.held
            if self.batch_invariant and weight is not None:
                return self._products.invariant_linear(x, weight, self.bias, wide=wide)
            if self.held is not None:
                return self._products.held_linear(x, self.held, self.bias, wide=wide)
        y = self._multiply_dense(x)
        return y.float() if wide else y

    def _multiply_dense(self, x: Tensor) -> Tensor:
        if self._dense is not None:
            return functional.linear(x, self._dense, self.bias)
        if x.shape[0] == 1:  # alone it takes another kernel of oneDNN, which sums in another order
            return self._multiply_onednn(x.expand(2, -1).contiguous())[:1]
        return self._multiply_onednn(x)

    def _multiply_onednn(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._onednn, self.bias, "none", [], "")
        return product


class GatedLinear(Linear):
    """activation(x G^T) * x U^T for W = [G; U], [2 * n, in]: one pass where the kernels can."""

    alternates = True

    def activated(self, x: Tensor, activation: str, change: LoraChange | None = None) -> Tensor:
        """x [T, in] to [T, n]. `activation` as `kernels.gated` has it; a `change` is added before it."""
        if change is not None:
            return self._changed(x, activation, change)
        if isinstance(x, Slot):
            return x.recorder.linear(x, self.native, self.out_features // 2, activation, False)
        if self.native is not None and (packing := self._packing) is not None:
            return packing.linear(x, self.native, activation, False)
        return gated(self._multiply(x), activation)

    def _changed(self, x: Tensor, activation: str, change: LoraChange) -> Tensor:
        """In two passes: rows that nothing changes keep the bits that one pass gives them."""
        if isinstance(x, Slot):
            both = change.add(x, x.recorder.linear(x, self.native, self.out_features, "", False))
            return x.recorder.gate_panels(both, activation)
        if self.native is not None and (packing := self._packing) is not None:
            return packing.gate_panels(change.add(x, packing.linear(x, self.native, "", False)), activation)
        return gated(change.add(x, self._multiply(x)), activation)


def _device_of(weight: Weight) -> torch.device:
    return weight.numbers.device if isinstance(weight, QuantisedWeight) else weight.device


def _packed(
    packing: NativeBackend | None, weight: Weight, bias: Tensor | None, dtype: torch.dtype, alternate: bool
) -> PackedWeight | None:
    if packing is None or dtype not in FORMATS:
        return None
    if isinstance(weight, QuantisedWeight):
        return pack_quantised(weight, bias, gated=alternate)
    if weight.dtype == torch.bfloat16:
        if not packing.multiplies_bf16:
            return None
        if (packed := pack_12bit(weight, bias, packing.pack_12bit, gated=alternate)) is not None:
            return packed
    elif (packed := pack_widened(weight, bias, gated=alternate, fp16=packing.widens_fp16)) is not None:
        return packed
    return pack_dense(weight, bias, gated=alternate)


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
