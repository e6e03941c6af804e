"""Numbers that travel between the host and a device while neither waits: pinned buffers, one copy for many arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, for views of any type


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """These arrays on the device, in one copy that the host does not wait for; on a CPU the arrays themselves."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    there = host.to(device, non_blocking=True)  # torch keeps `host` until it has been read
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there once the device has done all that was launched so far."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)
