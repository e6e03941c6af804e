"""Weights in the order in which the CPU's matrix product reads them: see `native/linear.h`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kernels.large_pages import ARENA
from kernels.native_build import load_native
from kernels.quantised import QuantisedWeight

FLOAT32, BRAIN, HALF, BFLOAT16, SHORT, INT8, INT4 = range(7)
FORMATS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
WIDENED: Final = {torch.bfloat16: BRAIN, torch.float16: HALF}
"""Formats of weights that are multiplied in float32, and are no wider than this."""
PAIR: Final = {BRAIN: 2, BFLOAT16: 2}
PART_ROWS: Final = 4096  # that are looked at together
SHORT_INPUTS: Final = 4  # that lie together
READ_AHEAD: Final = 4096  # bytes behind the last panel that a prefetch may name
Shorten = Callable[[Tensor], tuple[Tensor, Tensor, Tensor] | None]
"""Of bfloat16 rows in the panels' order: codes, exponents and odd weights (`native/short_weights.h`)."""


@functools.cache
def panel_size() -> int:
    """Outputs of a panel, as this machine's kernels have them; of a gated product half are gates, half their ups."""
    library = load_native()
    if library is None:
        raise RuntimeError("weights are packed for the native kernels, which cannot be built here")
    return int(library.diptych_panel())


class WeightsStruct(ctypes.Structure):
    """`struct Weights`."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix, its bias, and whether gate and up rows alternate in its panels."""

    format: int
    out_features: int
    in_features: int
    group: int
    gated: bool
    codes: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    bias: Tensor | None = None
    struct: WeightsStruct = field(init=False)

    def __post_init__(self) -> None:
        pointers = (0 if t is None else t.data_ptr() for t in (self.codes, self.scale, self.offset, self.bias))
        sizes = (self.out_features, self.in_features, self.group, self.format)
        object.__setattr__(self, "struct", WeightsStruct(*pointers, *sizes))

    @property
    def coded(self) -> bool:
        """Whether the inputs must be quantised too."""
        return self.format >= INT8

    @property
    def num_bytes(self) -> int:
        """That a product reads: codes, scales and offsets."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.offset) if t is not None)

    @property
    def address(self) -> int:
        """Of `struct Weights`, for as long as this lives."""
        return ctypes.addressof(self.struct)


def pack_dense(weight: Tensor, bias: Tensor | None, *, gated: bool) -> PackedWeight | None:
    """W [out, in], float32 or bfloat16, and as such the input of its product; None where its sizes do not fit."""
    return _pack(weight, FORMATS[weight.dtype], bias, gated)


def pack_widened(weight: Tensor, bias: Tensor | None, *, gated: bool, halves: bool) -> PackedWeight | None:
    """W [out, in], float32, in 16 bits: the product widens them again. None where that would lose anything.

    `halves`: whether this CPU widens float16.
    """
    for dtype in (torch.bfloat16, torch.float16) if halves else (torch.bfloat16,):
        if all(torch.equal(part.to(dtype).float(), part) for part in torch.split(weight, PART_ROWS)):
            return _pack(weight.to(dtype), WIDENED[dtype], bias, gated)
    return None


def _pack(weight: Tensor, kind: int, bias: Tensor | None, gated: bool) -> PackedWeight | None:
    pair = PAIR.get(kind, 1)
    if weight.shape[1] % pair or (gated and weight.shape[0] % panel_size()):
        return None
    panels = _in_panels(weight, gated).view(-1, panel_size(), weight.shape[1] // pair, pair).permute(0, 2, 1, 3)
    rows, columns = weight.shape
    return PackedWeight(kind, rows, columns, columns, gated, _flat(panels), bias=_bias(bias, gated))


def pack_short(weight: Tensor, bias: Tensor | None, shorten: Shorten, *, gated: bool) -> PackedWeight | None:
    """W [out, in], bfloat16, in 12 bits; None where its sizes do not fit, or too many exponents are rare."""
    rows, columns = weight.shape
    if columns % SHORT_INPUTS or (gated and rows % panel_size()):
        return None
    if (short := shorten(_in_panels(weight, gated))) is None:
        return None
    return PackedWeight(SHORT, rows, columns, columns, gated, *short, bias=_bias(bias, gated))


def pack_quantised(weight: QuantisedWeight, bias: Tensor | None, *, gated: bool) -> PackedWeight | None:
    """Of 8 or 4 bits; None where its sizes do not fit."""
    rows, columns = weight.shape
    if gated and rows % panel_size():
        return None
    codes = _in_panels(weight.codes, gated)
    groups = columns // weight.group
    scale = _by_group(_in_panels(weight.scale, gated), groups)
    if weight.bits == 8:
        sums = codes.view(-1, groups, weight.group).sum(-1, dtype=torch.int32) * -128
        offset = _by_group(sums, groups)
        panels = codes.view(-1, panel_size(), columns // 4, 4).permute(0, 2, 1, 3)
        return PackedWeight(INT8, rows, columns, weight.group, gated, _flat(panels), scale, offset, _bias(bias, gated))
    if weight.offset is None:
        raise ValueError("4-bit weights have an offset for each group")
    offset = _by_group(_in_panels(weight.offset, gated), groups)
    quads = codes.view(torch.uint8).view(-1, panel_size(), columns // 8, 2, 4)
    halves = (quads[..., 0, :] | (quads[..., 1, :] << 4)).permute(0, 2, 1, 3)
    return PackedWeight(INT4, rows, columns, weight.group, gated, _flat(halves), scale, offset, _bias(bias, gated))


def unpack(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """W [out, in] as the codes of quantised weights stand for."""
    columns, groups = packed.in_features, packed.in_features // packed.group
    if packed.scale is None or packed.offset is None:
        raise ValueError("quantised weights have scales and offsets")
    if packed.format == INT8:
        quads = _values(packed.codes, torch.int8).view(-1, columns // 4, panel_size(), 4).permute(0, 2, 1, 3)
        codes = quads.reshape(-1, groups, packed.group).float()
    else:
        octets = _values(packed.codes, torch.uint8).view(-1, columns // 8, panel_size(), 4).permute(0, 2, 1, 3)
        codes = torch.stack((octets & 15, octets >> 4), dim=-2).reshape(-1, groups, packed.group).float()
    weight = codes * packed.scale.view(-1, groups, panel_size()).transpose(1, 2).reshape(-1, groups, 1).float()
    if packed.format == INT4:
        weight += packed.offset.view(-1, groups, panel_size()).transpose(1, 2).reshape(-1, groups, 1).float()
    return in_order(weight.reshape(-1, columns), packed).to(dtype)


def _in_panels(rows: Tensor, gated: bool) -> Tensor:
    """Rows in the panels' order, padded with zeros to whole panels."""
    if gated:
        rows = rows.view(2, -1, panel_size() // 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
    missing = -rows.shape[0] % panel_size()
    if not missing:
        return rows.contiguous()
    return torch.cat((rows, rows.new_zeros((missing, rows.shape[1]))))


def in_order(panels: Tensor, packed: PackedWeight) -> Tensor:
    """The inverse of `_in_panels`."""
    rows = panels[: packed.out_features]
    if packed.gated:
        rows = rows.view(-1, 2, panel_size() // 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
    return rows.contiguous()


def _by_group(values: Tensor, groups: int) -> Tensor:
    """[rows, groups] to [panel][group][output]."""
    panels = values.view(-1, panel_size(), groups).transpose(1, 2)
    return _flat(panels).view(values.dtype).view(panels.shape)


def _bias(bias: Tensor | None, gated: bool) -> Tensor | None:
    return None if bias is None else _in_panels(bias.float().unsqueeze(1), gated).flatten().contiguous()


def room(size: int) -> Tensor:
    """Bytes aligned to a cache line, with as many behind them as a prefetch may name."""
    return ARENA.take(size + READ_AHEAD)[:size]


def _flat(panels: Tensor) -> Tensor:
    place = room(panels.numel() * panels.element_size())
    place.view(panels.dtype).view(panels.shape).copy_(panels)
    return place


def _values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.view(dtype)
