"""Weights of 4, 5 and 6 bits in the order in which products read them (`native/weights.h`, `native/nibbles.h`)."""

from __future__ import annotations

import torch
from torch import Tensor

OCTET = 8
"""Inputs whose upper bits fill a byte for each bit."""


def unit_of(bits: int) -> int:
    """Return the number of inputs whose upper bits are stored together after their nibbles."""
    return 32 // (bits - 4) if bits > 4 else OCTET


def pack_nibbles(numbers: Tensor, bits: int, panel: int) -> Tensor:
    """int8 [whole panels, k], 0 .. 2^bits - 1, to uint8 [panels, k / unit, parts, panel, 4]."""
    unit, upper = unit_of(bits), bits - 4
    octets = numbers.view(torch.uint8).view(-1, panel, numbers.shape[1] // unit, unit // OCTET, 2, 4)
    low = octets & 15
    parts = [(low[..., 0, :] | (low[..., 1, :] << 4)).permute(0, 2, 3, 1, 4)]
    if upper:
        plane = torch.zeros_like(octets[:, :, :, 0, 0])  # [panels, panel, units, 4]
        for octet in range(unit // OCTET):
            for half in range(2):
                plane |= (octets[:, :, :, octet, half] >> 4) << (upper * (2 * octet + half))
        parts.append(plane.permute(0, 2, 1, 3).unsqueeze(2))
    return torch.cat(parts, dim=2)


def unpack_nibbles(data: Tensor, bits: int, columns: int, panel: int) -> Tensor:
    """The inverse: int8 [whole panels, k]."""
    unit, upper = unit_of(bits), bits - 4
    count = unit // OCTET
    parts = data.view(torch.uint8).view(-1, columns // unit, count + (1 if upper else 0), panel, 4)
    low = torch.stack(
        (parts[:, :, :count] & 15, parts[:, :, :count] >> 4), dim=3
    )  # [panels, units, octets, 2, panel, 4]
    if upper:
        shifts = (torch.arange(2 * count, dtype=torch.uint8) * upper).view(count, 2, 1, 1)
        low = low | ((parts[:, :, count, None, None] >> shifts) & (2**upper - 1)) << 4
    return low.permute(0, 4, 1, 2, 3, 5).reshape(-1, columns).view(torch.int8)
