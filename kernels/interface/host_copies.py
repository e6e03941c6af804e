"""Numbers that travel between the host and a device while neither waits: pinned buffers, one copy for many arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGN_BYTES = 16  # for views of any type


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """These arrays on the device, in one copy that the host does not wait for; on a CPU the arrays themselves."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES
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


class Staging:
    """Host copies of a device buffer, used in turn: one is not overwritten while the device may still read it."""

    def __init__(self, target: Tensor, copies: int) -> None:
        pinned = target.device.type == "cuda"
        self._target = target
        self._hosts = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=pinned) for _ in range(copies)]
        self._done = [torch.cuda.Event() if pinned else None for _ in range(copies)]  # type: ignore[no-untyped-call]
        self._next = 0

    def next(self) -> np.ndarray:
        """The copy to write. Waits until the device has read what `send` last sent from it."""
        done = self._done[self._next]
        if done is not None:
            done.synchronize()
        return self._hosts[self._next].numpy()

    def send(self, count: int) -> None:
        """Copies the first `count` numbers of it to the device, in the order of the current stream."""
        self._target[:count].copy_(self._hosts[self._next][:count], non_blocking=True)
        done = self._done[self._next]
        if done is not None:
            done.record()
        self._next = (self._next + 1) % len(self._hosts)
