"""Asynchronous copies between the host and a device. Combines arrays in one copy; uses pinned memory on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.interface.pinned_memory import pinned

ALIGN_BYTES = 16  # for views of any type
Write = Callable[[np.ndarray], None]


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one asynchronous copy. On a CPU, the tensors share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES

    def write(memory: np.ndarray) -> None:
        for start, array in zip(starts, arrays, strict=True):
            memory[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)

    there = bytes_to_device(end, write, device)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def bytes_to_device(num_bytes: int, write: Write, device: torch.device) -> Tensor:
    """Copy uint8 [num_bytes], filled by `write`, to the device. Asynchronous."""
    if device.type != "cuda":
        host = torch.empty(num_bytes, dtype=torch.uint8)
        write(host.numpy())
        return host.to(device, non_blocking=True)
    ring = pinned().ring
    piece = ring.take(num_bytes)
    write(piece.memory)
    there = torch.from_numpy(piece.memory).to(device, non_blocking=True)
    ring.launched(piece, device)
    return there


def fill_device(target: Tensor, count: int, write: Write) -> None:
    """Copy `count` elements, zeros modified by `write`, to the start of `target` [n], ordered by the current stream."""
    zeros = torch.zeros(0, dtype=target.dtype).numpy().dtype
    if target.device.type != "cuda":
        numbers = np.zeros(count, dtype=zeros)
        write(numbers)
        target[:count].copy_(torch.from_numpy(numbers), non_blocking=True)
        return
    ring = pinned().ring
    piece = ring.take(count * zeros.itemsize)
    numbers = piece.memory.view(zeros)
    numbers[:] = 0
    write(numbers)
    target[:count].copy_(torch.from_numpy(piece.memory).view(target.dtype), non_blocking=True)
    ring.launched(piece, target.device)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host. The data is valid when the device has finished all work launched so far."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    if tensor.device.type != "cuda":
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor, non_blocking=True)
    ring = pinned().ring
    piece = ring.take(tensor.numel() * tensor.dtype.itemsize)
    host = torch.from_numpy(piece.memory).view(tensor.dtype).view(tensor.shape)  # keeps the piece as long as it lives
    host.copy_(tensor, non_blocking=True)
    ring.launched(piece, tensor.device)
    return host
