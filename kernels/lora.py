"""LoRA: y += B (A x) with the adapter of each row.

Each adapter has a numbered slot, which rows refer to. Rows without an adapter are unchanged, bit for bit, and a row's
result does not depend on the adapters of other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends import backend
from kernels.cpu.backend import NativeBackend
from kernels.cpu.native_plan import WIDTH_MULTIPLE
from kernels.cpu.packed import panel_size
from kernels.cpu.recorder import NotRecordable, Slot
from kernels.cpu.structs import LoraStruct
from kernels.interface.lora import GroupedRows, LoraStack

NO_ADAPTER = -1
LEAST_COLUMNS = 16
"""Minimum tile width of the GPU product. Tiles must not cross parts."""


class LoraPart(NamedTuple):
    """Adds b (a x) to outputs first .. first + len(b). a [rank, in]; b [outputs, rank], already scaled."""

    first: int
    a: Tensor
    b: Tensor


@dataclass(slots=True)
class LoraRows:
    """Adapters of a step's rows, int64 [T], NO_ADAPTER for none. Grouped lazily for GPU kernels."""

    adapters: Tensor
    _grouped: GroupedRows | None = None

    def select(self, rows: Tensor) -> LoraRows:
        """Select rows, int64 [n]."""
        return LoraRows(self.adapters.index_select(0, rows))

    def grouped(self, max_loras: int) -> GroupedRows:
        """Return the rows grouped by adapter."""
        if self._grouped is None:
            self._grouped = GroupedRows.of(self.adapters, max_loras)
        return self._grouped


class LoraSite:
    """LoRA adapters of one weight matrix, with one slot for each of up to `max_loras` adapters.

    `parts`: number of outputs of each part of the matrix, such as q, k and v, in order. With `panels`, outputs are in
    the panel order of a packed gated product. `batch_invariant` as in `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        *,
        max_loras: int,
        max_rank: int,
        panels: bool,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        self.in_features, self.parts, self.panels = in_features, tuple(parts), panels
        self.dtype, self.device, self.batch_invariant = dtype, device, batch_invariant
        self._held: list[tuple[LoraPart, ...]] = [()] * max_loras
        self._packing = _packing(in_features, parts, dtype, device)
        self._changes = (LoraStruct * max_loras)() if self._packing is not None else None
        self._stack: LoraStack | None = None
        self._products = backend(device.type).products
        begins = (sum(self.parts[:i]) for i in range(1, len(self.parts)))
        if self._products is not None and not any(begin % LEAST_COLUMNS for begin in begins):
            self._stack = LoraStack.empty(in_features, self.parts, max_loras, max_rank, dtype, device)

    def set(self, place: int, parts: Sequence[LoraPart]) -> int:
        """Load an adapter into slot `place`. An adapter without parts has no effect. Returns its size in bytes."""
        if self._stack is not None:
            self._stack.set(place, [(self._number(part.first), part.a, part.b) for part in parts])
        elif self._packing is not None:
            joined = self._kept(torch.cat([part.a for part in parts]) if parts else torch.empty(0, self.in_features))
            held = tuple(LoraPart(part.first, joined, self._kept(part.b.T)) for part in parts)
            self._point(place, held, [part.a.shape[0] for part in parts], joined)
            self._held[place] = held
        else:
            self._held[place] = tuple(LoraPart(first, self._kept(a), self._kept(b)) for first, a, b in parts)
        return sum(part.a.numel() + part.b.numel() for part in parts) * self.dtype.itemsize

    def add(self, x: Tensor, y: Tensor, rows: LoraRows | None) -> Tensor:
        """Add the adapter products of x [T, in] to y [T, out] in place. A recorded `Slot` uses the rows of its step."""
        if isinstance(y, Slot):
            if self._changes is None:
                raise NotRecordable("adapters of this size or type")
            y.recorder.lora(x, y, self._changes, self.panels)
            return y
        assert rows is not None  # only slots have none
        if self._products is not None and self._stack is not None:
            grouped = rows.grouped(len(self._held))
            self._products.add_lora(x.contiguous(), y, self._stack, grouped, batch_invariant=self.batch_invariant)
        elif self._packing is not None and self._changes is not None:
            self._packing.add_lora(x.contiguous(), y, rows.adapters, self._changes, self.panels)
        else:
            self._add_plain(x, y, rows)
        return y

    def _add_plain(self, x: Tensor, y: Tensor, rows: LoraRows) -> None:
        """Compute row by row, because products of several rows may depend on the number of rows."""
        for row, place in enumerate(rows.adapters.tolist()):
            for first, a, b in self._held[place] if place >= 0 else ():
                low = (a.float() * x[row].float()).sum(1)
                columns = self._columns(first, b.shape[0])
                y[row, columns] = (y[row, columns].float() + (b.float() * low).sum(1)).to(y.dtype)

    def _columns(self, first: int, count: int) -> Tensor:
        """Return the column indices of outputs, int64 [count]."""
        places = torch.arange(count, device=self.device)
        if not self.panels:
            return places + first
        half = panel_size() // 2
        return places // half * 2 * half + places % half + self._number(first) * half

    def _kept(self, weight: Tensor) -> Tensor:
        return weight.to(device=self.device, dtype=self.dtype).contiguous()

    def _number(self, first: int) -> int:
        """Return the index of the part that starts at output `first`."""
        return [sum(self.parts[:i]) for i in range(len(self.parts))].index(first)

    def _point(self, place: int, held: Sequence[LoraPart], ranks: Sequence[int], joined: Tensor) -> None:
        """Set the native struct of an adapter. B in `held` is transposed: [rank, outputs]."""
        assert self._changes is not None
        change = self._changes[place]
        change.num_parts = 0  # not read concurrently, because no row uses the adapter yet
        for struct, part, rank in zip(change.parts, held, ranks, strict=False):
            struct.first = self._number(part.first) * panel_size() // 2 if self.panels else part.first
            struct.count, struct.rank, struct.b = part.b.shape[1], rank, part.b.data_ptr()
        change.a, change.num_parts = joined.data_ptr(), len(held)


class LoraChange(NamedTuple):
    """Adapters of a product and its rows. `rows` is None while a program is being recorded."""

    site: LoraSite
    rows: LoraRows | None

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """See `LoraSite.add`."""
        return self.site.add(x, y, self.rows)


def _packing(in_features: int, parts: Sequence[int], dtype: torch.dtype, device: torch.device) -> NativeBackend | None:
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    fits = not any(size % WIDTH_MULTIPLE for size in (in_features, *parts))
    return backend(device.type).packing if fits else None
