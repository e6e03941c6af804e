"""Copies between a device and host memory: all that transfers ask of CUDA. On the CPU they are plain copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from common.errors import DiptychError

PART_BYTES = 2**20
"""A block is read in parts of this size, each while the next ones are still copied."""
READ_ONLY = 8
"""cudaHostRegisterReadOnly: the device reads the memory, and never writes it."""


class NotRegistered(DiptychError):
    """The device cannot reach memory of the host directly. The message says why."""


class CopyStream:
    """A stream of the device for copies alone, used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of host memory that the device reaches directly."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def run(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy (target, source) pairs and wait for them; other threads may run meanwhile."""

        def copy() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        self.wait_for(copy)

    def wait_for(self, work: Callable[[], None]) -> None:
        """Call `work`, and wait for what it launches on this stream."""
        if self._stream is None:
            work()
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def in_parts(self, target: Tensor, source: Tensor) -> Iterator[slice]:
        """Copy uint8 [n] to uint8 [n]; yields each part once it is copied, while those behind it still are."""
        if self._stream is None:
            target.copy_(source)
            yield slice(0, len(target))
            return
        parts = [slice(begin, begin + PART_BYTES) for begin in range(0, len(target), PART_BYTES)]
        marks = []
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for part in parts:
                target[part].copy_(source[part], non_blocking=True)
                marks.append(self._stream.record_event())
        for part, mark in zip(parts, marks, strict=True):
            mark.synchronize()
            yield part

    def register(self, memory: Tensor, *, read_only: bool = False) -> None:
        """Let the device reach `memory`, uint8 [n] in whole pages that this process mapped, until `unregister`.

        `read_only`: the pages are mapped so. Raises NotRegistered.
        """
        if self._stream is not None:
            flags = READ_ONLY if read_only else 0
            code = self._call("cudaHostRegister", memory.data_ptr(), len(memory), flags)
            if code:
                raise NotRegistered(f"CUDA does not register {len(memory):,} bytes: {torch.cuda.CudaError(code)}")

    def unregister(self, memory: Tensor) -> None:
        """Ends the device's access. Call it after the last copy and before `memory` is unmapped."""
        if self._stream is not None:
            self._call("cudaHostUnregister", memory.data_ptr())

    def _call(self, function: str, *arguments: int) -> int:
        """What a function of CUDA's runtime returns, called in a thread of its own.

        CUDA remembers a failure for the thread that called, and torch would take it for that of the thread's next
        kernel.
        """

        def call() -> int:
            with torch.cuda.device(self.device):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                return int(getattr(runtime, function)(*arguments))

        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(call).result()
