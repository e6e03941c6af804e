"""Weights as small integers with a scale for every group of inputs, and their quantisation from floats.

`quantise` rounds to nearest, a group at a time: int8 is symmetric, int4 spans a group's smallest to its largest weight,
as GGUF's Q4_1 does. Files that hold such groups keep theirs. A group whose weights are small whole multiples of a power
of two, as those of MXFP4 are, loses nothing in int8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

INT8_GROUP: Final = 64
"""Inputs that share a scale."""
INT4_GROUP: Final = 32
BLOCK: Final = 256
"""Inputs that share what steps are multiplied by."""
STEPPED_GROUP: Final = 16
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Floats of 4 bits by their codes (OCP Microscaling Formats, version 1.0)."""
LEVELS: Final = {8: 127, 4: 15}
PROBED_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """W [out, in] = scale * numbers + offset, group by group.

    numbers int8 [out, in], -128 .. 127 for 8 bits and 0 .. 2^bits - 1 for 4, 5 and 6; scale and, for all but 8 bits,
    offset float16 [out, in / group]. Or, `floats`, numbers uint8 and scale float32 or bfloat16: for 8 bits the bits of
    e4m3 numbers, for 4 codes of `E2M1`.

    With `steps`, as GGUF's K-quants have them, scale and offset are float16 [out, in / BLOCK], and are multiplied by
    their steps, int8 [out, in / group]: the offset by `offset_steps`, or by those of the scale.
    """

    bits: int
    group: int
    numbers: Tensor
    scale: Tensor
    offset: Tensor | None
    steps: Tensor | None = None
    offset_steps: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def floats(self) -> bool:
        return self.numbers.dtype == torch.uint8

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W in `dtype`, [out, in]."""
        rows, columns = self.shape
        values = as_floats(self.numbers, self.bits, floats=self.floats)
        weight = values.view(rows, -1, self.group) * self._by_group(self.scale, self.steps)
        if self.offset is not None:
            weight += self._by_group(self.offset, self.steps if self.offset_steps is None else self.offset_steps)
        return weight.view(rows, columns).to(dtype)

    def _by_group(self, factors: Tensor, steps: Tensor | None) -> Tensor:
        """float32 [out, in / group, 1]."""
        if steps is None:
            return factors.float().unsqueeze(-1)
        return (factors.float().repeat_interleave(BLOCK // self.group, dim=1) * steps).unsqueeze(-1)

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantisedWeight:
        """The same with each of its tensors changed alike."""
        parts = (self.numbers, self.scale, self.offset, self.steps, self.offset_steps)
        numbers, scale, *rest = (None if part is None else change(part) for part in parts)
        assert numbers is not None and scale is not None
        return QuantisedWeight(self.bits, self.group, numbers, scale, *rest)

    def rows(self, order: Tensor) -> QuantisedWeight:
        """The same with its rows in another order, int64 [out]."""
        return self.map(lambda part: part[order])

    def parted(self, count: int) -> list[QuantisedWeight]:
        """Split a vertical stack of `count` matrices. The results share its memory."""
        rows = self.shape[0] // count

        def part(i: int) -> QuantisedWeight:
            return self.map(lambda tensor: tensor[i * rows : (i + 1) * rows])

        return [part(i) for i in range(count)]

    @property
    def whole_inputs(self) -> int:
        """Inputs that cannot be parted: those of a group, or of a block with steps."""
        return self.group if self.steps is None else BLOCK

    def columns(self, part: range) -> QuantisedWeight:
        """These inputs of it alone, which are whole groups."""
        width = self.shape[1]

        def cut(tensor: Tensor) -> Tensor:
            each = width // tensor.shape[1]
            return tensor[:, part.start // each : part.stop // each].contiguous()

        return self.map(cut)

    def matches(self, other: QuantisedWeight) -> bool:
        """Whether both can be stacked."""
        return self._form == other._form

    @property
    def _form(self) -> tuple[object, ...]:
        absent = tuple(part is None for part in (self.offset, self.steps, self.offset_steps))
        return self.bits, self.floats, self.group, self.shape[1], absent


def as_floats(numbers: Tensor, bits: int, *, floats: bool) -> Tensor:
    """float32 of the numbers of a `QuantisedWeight`, one each."""
    if not floats:
        return numbers.float()
    if bits == 4:
        return torch.tensor(E2M1, device=numbers.device)[numbers.int()]
    return numbers.view(torch.float8_e4m3fn).float()


def stack(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """One matrix of parts that match, one below the other."""
    first = parts[0]

    def below(one: Callable[[QuantisedWeight], Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in map(one, parts) if tensor is not None]
        return torch.cat(found) if found else None

    numbers, scale = torch.cat([part.numbers for part in parts]), torch.cat([part.scale for part in parts])
    rest = (below(lambda w: w.offset), below(lambda w: w.steps), below(lambda w: w.offset_steps))
    return QuantisedWeight(first.bits, first.group, numbers, scale, *rest)


def unified(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """One matrix of parts of several formats, in one that holds all of them exactly; None where there is none.

    Formats with steps meet in 6 bits with groups of 16, those whose offset is -2^(bits - 1) scales in 8 bits.
    """
    if all(map(parts[0].matches, parts)):
        return stack(parts)
    if all(part.steps is not None for part in parts):
        return stack([_stepped(part) for part in parts])
    centred = [one for part in parts if (one := _centred(part)) is not None]
    if len(centred) < len(parts) or not all(map(centred[0].matches, centred)):
        return None
    return stack(centred)


def _stepped(weight: QuantisedWeight) -> QuantisedWeight:
    """The same in 6 bits with groups of 16 and steps for offsets."""
    assert weight.steps is not None
    times = weight.group // STEPPED_GROUP
    steps = weight.steps.repeat_interleave(times, dim=1)
    offset_steps = steps if weight.offset_steps is None else weight.offset_steps.repeat_interleave(times, dim=1)
    return QuantisedWeight(6, STEPPED_GROUP, weight.numbers, weight.scale, weight.offset, steps, offset_steps)


def _centred(weight: QuantisedWeight) -> QuantisedWeight | None:
    """The same in 8 bits without offsets; None where these are not in the middle of the numbers."""
    if weight.steps is not None:
        return None
    if weight.offset is None:
        return weight
    middle = 2 ** (weight.bits - 1)
    if not torch.equal(weight.offset.float(), weight.scale.float() * -middle):
        return None
    return QuantisedWeight(8, weight.group, weight.numbers - middle, weight.scale, None)


def rounding_group(bits: int, num_inputs: int) -> int:
    """Inputs that share a scale when a matrix is rounded; 0 where it cannot be."""
    sizes = (INT4_GROUP,) if bits == 4 else (INT8_GROUP, INT4_GROUP)
    return next((size for size in sizes if num_inputs % size == 0), 0)


def quantise(weight: Tensor, bits: int) -> QuantisedWeight | None:
    """W [out, in] in 8 or 4 bits; None where its columns do not fall into whole groups."""
    if not (group := rounding_group(bits, weight.shape[1])):
        return None
    parts = weight.float().view(weight.shape[0], -1, group)
    offset: Tensor | None = None
    if bits == 8:
        scale = _scales(parts)
        numbers = parts / _divisor(scale)
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        scale, offset = _half((high - low) / LEVELS[4]), _half(low)
        numbers = (parts - offset.float().unsqueeze(-1)) / _divisor(scale)
    limits = (-LEVELS[8], LEVELS[8]) if bits == 8 else (0, LEVELS[4])
    rounded = numbers.round_().clamp_(*limits).to(torch.int8).view(weight.shape)
    return QuantisedWeight(bits, group, rounded, scale, offset)


def _scales(parts: Tensor) -> Tensor:
    """float16 scales [out, groups] of int8 for W [out, groups, group]: the largest weight is 127, or a multiple of one.

    First samples a few rows for weights that are multiples of powers of two, to avoid a full pass over other matrices.
    """
    peak = parts.abs().amax(-1)
    scale, rows = _half(peak / LEVELS[8]), slice(None, None, max(1, len(parts) // PROBED_ROWS))
    if not _steps(parts[rows], peak[rows]).any():
        return scale
    steps = _steps(parts, peak).half()
    return torch.where(steps > 0, steps, scale)


def _steps(parts: Tensor, peak: Tensor) -> Tensor:
    """The power of two of which every weight of a group is a multiple of at most 127, 0 where there is none.

    float32 [out, groups], each a float16 number. The largest weight, `peak`, is a multiple of 64 or more.
    """
    step = torch.ldexp(torch.ones_like(peak), torch.frexp(peak).exponent - 7)
    step = torch.where((peak > 0) & (step.half() == step), step, torch.zeros_like(step))
    multiples = parts / _divisor(step)
    whole = (multiples == multiples.round()).all(-1) & (peak <= LEVELS[8] * step)
    return torch.where(whole, step, torch.zeros_like(step))


def _half(values: Tensor) -> Tensor:
    return values.clamp(-65504.0, 65504.0).half()


def _divisor(scale: Tensor) -> Tensor:
    """A group of equal weights has scale 0, and any number."""
    wide = scale.float().unsqueeze(-1)
    return torch.where(wide == 0, torch.ones_like(wide), wide)
