"""Packing of weights for the CPU's matrix products: see `native/weights.h`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.build import load_native
from kernels.cpu.large_pages import ARENA
from kernels.cpu.nibbles import pack_nibbles, unit_of, unpack_nibbles
from kernels.cpu.shared_weights import is_sharing, shared
from kernels.cpu.structs import WeightsStruct
from kernels.interface import QuantisedWeight

FLOAT32, WIDENED_BF16, WIDENED_FP16, BF16, BF16_12BIT, Q8, Q4, Q5, Q4K, Q5K, Q6K, MIXED_K = range(12)
"""`enum class Format` of `native/weights.h`."""
FORMATS: Final = {torch.float32: FLOAT32, torch.bfloat16: BF16}
WIDENED: Final = {torch.bfloat16: WIDENED_BF16, torch.float16: WIDENED_FP16}
"""Formats of float32 weights that are exactly representable in 16 bits."""
NIBBLES: Final = {
    **{(4, False, False): Q4, (5, False, False): Q5, (4, True, True): Q4K},
    **{(5, True, True): Q5K, (6, True, False): Q6K, (6, True, True): MIXED_K},
}
"""Formats by (bits, scales have steps, offsets have separate steps)."""
CENTRE: Final = -32
"""Offset in units of the scale, for formats without separate offset steps."""
PAIRED: Final = (WIDENED_BF16, BF16)
INPUTS_12BIT: Final = 4  # consecutive inputs of an output
PART_ROWS: Final = 4096  # matrix rows compared at a time
READ_AHEAD: Final = 4096  # bytes after the last panel that a prefetch may touch
Pack12Bit = Callable[[Tensor], tuple[Tensor, Tensor, Tensor] | None]
"""Packs bf16 rows in panel order into data, exponents and outliers (`native/bf16_12bit.h`)."""


@functools.cache
def panel_size() -> int:
    """Return the number of outputs of a panel on this machine. In a gated product, half are gates and half are ups."""
    library = load_native()
    if library is None:
        raise RuntimeError("weights are packed for the native kernels, which cannot be built here")
    return int(library.diptych_panel())


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix with its bias. `gated`: panels contain both gate and up rows."""

    format: int
    out_features: int
    in_features: int
    group: int
    gated: bool
    data: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    bias: Tensor | None = None
    struct: WeightsStruct = field(init=False)

    def __post_init__(self) -> None:
        for name in ("data", "scale", "offset"):
            if (part := getattr(self, name)) is not None:
                object.__setattr__(self, name, shared(part))
        pointers = (0 if t is None else t.data_ptr() for t in (self.data, self.scale, self.offset, self.bias))
        sizes = (self.out_features, self.in_features, self.group, self.format)
        object.__setattr__(self, "struct", WeightsStruct(*pointers, *sizes))

    @property
    def quantised(self) -> bool:
        """Whether the inputs must be quantised too."""
        return self.format >= Q8

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads: data, scales and offsets, without the bias."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.offset) if t is not None)

    @property
    def address(self) -> int:
        """The address of `struct Weights`, valid for as long as this object lives."""
        return ctypes.addressof(self.struct)


def pack_dense(weight: Tensor, bias: Tensor | None, *, gated: bool) -> PackedWeight | None:
    """Pack W [out, in], float32 or bf16, for inputs of the same type. Returns None for unsupported sizes."""
    return _pack(weight, FORMATS[weight.dtype], bias, gated)


def pack_widened(weight: Tensor, bias: Tensor | None, *, gated: bool, fp16: bool) -> PackedWeight | None:
    """Pack float32 W [out, in] in 16 bits, which the product widens. Returns None if this is not lossless.

    `fp16`: whether this CPU widens float16.
    """
    for dtype in (torch.bfloat16, torch.float16) if fp16 else (torch.bfloat16,):
        if all(torch.equal(part.to(dtype).float(), part) for part in torch.split(weight, PART_ROWS)):
            return _pack(weight.to(dtype), WIDENED[dtype], bias, gated)
    return None


def _pack(weight: Tensor, kind: int, bias: Tensor | None, gated: bool) -> PackedWeight | None:
    pair = 2 if kind in PAIRED else 1
    if weight.shape[1] % pair or (gated and weight.shape[0] % panel_size()):
        return None
    panels = _in_panels(weight, gated).view(-1, panel_size(), weight.shape[1] // pair, pair).permute(0, 2, 1, 3)
    rows, columns = weight.shape
    return PackedWeight(kind, rows, columns, columns, gated, _flat(panels), bias=_bias(bias, gated))


def pack_12bit(weight: Tensor, bias: Tensor | None, pack: Pack12Bit, *, gated: bool) -> PackedWeight | None:
    """Pack bf16 W [out, in] in 12 bits. Returns None for unsupported sizes or too many outliers."""
    rows, columns = weight.shape
    if columns % INPUTS_12BIT or (gated and rows % panel_size()):
        return None
    if (packed := pack(_in_panels(weight, gated))) is None:
        return None
    return PackedWeight(BF16_12BIT, rows, columns, columns, gated, *packed, bias=_bias(bias, gated))


def pack_quantised(weight: QuantisedWeight, bias: Tensor | None, *, gated: bool) -> PackedWeight | None:
    """Pack W of 4 to 8 bits. Returns None for unsupported sizes."""
    rows, columns = weight.shape
    if gated and rows % panel_size():
        return None
    if weight.bits != 8:
        return _pack_nibbles(weight, bias, gated)
    numbers, groups = _in_panels(weight.numbers, gated), columns // weight.group
    sums = numbers.view(-1, groups, weight.group).sum(-1, dtype=torch.int32) * -128
    scale, offset = _by_group(_in_panels(weight.scale, gated), groups), _by_group(sums, groups)
    panels = numbers.view(-1, panel_size(), columns // 4, 4).permute(0, 2, 1, 3)
    return PackedWeight(Q8, rows, columns, weight.group, gated, _flat(panels), scale, offset, _bias(bias, gated))


def _pack_nibbles(weight: QuantisedWeight, bias: Tensor | None, gated: bool) -> PackedWeight | None:
    """Pack W of 4, 5 or 6 bits. Returns None if there is no such format."""
    rows, columns = weight.shape
    kind = NIBBLES.get((weight.bits, weight.steps is not None, weight.offset_steps is not None))
    if weight.offset is None:
        raise ValueError("weights of 4 to 6 bits have an offset for each group")
    if kind is None or columns % unit_of(weight.bits):
        return None
    data = _flat(pack_nibbles(_in_panels(weight.numbers, gated), weight.bits, panel_size()))
    scale, offset = _in_panels(weight.scale, gated), _in_panels(weight.offset, gated)
    if weight.steps is None:
        groups = columns // weight.group
        factors, others = _by_group(scale, groups), _by_group(offset, groups)
    else:
        own = weight.offset_steps
        if own is None and not torch.equal(weight.offset, weight.scale * CENTRE):
            raise ValueError(f"an offset without steps is {CENTRE} scales")
        steps = _in_panels(weight.steps, gated)
        factors = _together(scale, None if own is None else offset)
        others = _together(steps, None if own is None else _in_panels(own, gated))
    return PackedWeight(kind, rows, columns, weight.group, gated, data, factors, others, _bias(bias, gated))


def unpack(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantise packed weights to W [out, in] in `dtype`."""
    columns, panel = packed.in_features, panel_size()
    if packed.scale is None or packed.offset is None:
        raise ValueError("quantised weights have scales and offsets")
    if packed.format == Q8:
        quads = packed.data.view(torch.int8).view(-1, columns // 4, panel, 4).permute(0, 2, 1, 3)
        weight = QuantisedWeight(8, packed.group, quads.reshape(-1, columns), _by_row(packed.scale), None)
        return in_order(weight.dense(dtype), packed)
    bits, stepped, own_steps = next(form for form, kind in NIBBLES.items() if kind == packed.format)
    numbers = unpack_nibbles(packed.data, bits, columns, panel)
    if not stepped:
        weight = QuantisedWeight(bits, packed.group, numbers, _by_row(packed.scale), _by_row(packed.offset))
        return in_order(weight.dense(dtype), packed)
    factors, steps = packed.scale.unbind(2), packed.offset.unbind(2)
    scale, offset = _by_row(factors[0]), _by_row(factors[1]) if own_steps else _by_row(factors[0]) * CENTRE
    rest = (_by_row(steps[0]), _by_row(steps[1]) if own_steps else None)
    return in_order(QuantisedWeight(bits, packed.group, numbers, scale, offset, *rest).dense(dtype), packed)


def _in_panels(rows: Tensor, gated: bool) -> Tensor:
    """Reorder rows for panels and pad them with zeros to whole panels."""
    if gated:
        rows = rows.view(2, -1, panel_size() // 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
    missing = -rows.shape[0] % panel_size()
    if not missing:
        return rows.contiguous()
    return torch.cat((rows, rows.new_zeros((missing, rows.shape[1]))))


def in_order(panels: Tensor, packed: PackedWeight) -> Tensor:
    """Inverse of `_in_panels`."""
    rows = panels[: packed.out_features]
    if packed.gated:
        rows = rows.view(-1, 2, panel_size() // 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
    return rows.contiguous()


def _by_group(values: Tensor, groups: int) -> Tensor:
    """Reorder [rows, groups] to [panel][group][output]."""
    panels = values.view(-1, panel_size(), groups).transpose(1, 2)
    return _flat(panels).view(values.dtype).view(panels.shape)


def _by_row(values: Tensor) -> Tensor:
    """Inverse of `_by_group`, including padding."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])


def _together(first: Tensor, second: Tensor | None) -> Tensor:
    """Interleave one or two tensors [rows, n] as [panel][n][1 or 2][output]."""
    parts = [part for part in (first, second) if part is not None]
    panels = torch.stack([part.view(-1, panel_size(), part.shape[1]).transpose(1, 2) for part in parts], dim=2)
    return _flat(panels).view(first.dtype).view(panels.shape)


def _bias(bias: Tensor | None, gated: bool) -> Tensor | None:
    return None if bias is None else _in_panels(bias.float().unsqueeze(1), gated).flatten().contiguous()


def room(size: int) -> Tensor:
    """Allocate `size` bytes aligned to a cache line, followed by READ_AHEAD bytes for prefetches."""
    if is_sharing():  # what is copied from here and freed must not keep a chunk of the arena
        return torch.zeros(size + READ_AHEAD, dtype=torch.uint8)[:size]
    return ARENA.take(size + READ_AHEAD)[:size]


def _flat(panels: Tensor) -> Tensor:
    place = room(panels.numel() * panels.element_size())
    place.view(panels.dtype).view(panels.shape).copy_(panels)
    return place
