"""Copies between device and host memory for transfers. On the CPU they are plain copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from common.errors import DiptychError
from kernels.interface import PIECE_ALIGN_BYTES, pinned

PART_BYTES = 2**20
"""Copy granularity: each part of a block is read while the following parts are still being copied."""
READ_ONLY = 8
"""cudaHostRegisterReadOnly: the device only reads the memory."""


class RegistrationError(DiptychError):
    """The device cannot access host memory directly. The message gives the reason."""


class CopyStream:
    """Device stream dedicated to copies, used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._registered: dict[int, int] = {}  # address -> entry in the account of pinned memory
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        """Stream handle for driver calls; 0 on a CPU."""
        return self._stream.cuda_stream if self._stream is not None else 0

    @property
    def pins(self) -> bool:
        """Whether the device can directly access host memory only if it is pinned."""
        return self._stream is not None

    def buffers(self, num_bytes: int, count: int) -> list[Tensor]:
        """Return `count` buffers, uint8 [num_bytes] each, that the device can access directly.

        Pins memory, so call it only at startup.
        """
        if not self.pins:
            return [self.spare(num_bytes) for _ in range(count)]
        stride = -(-num_bytes // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES
        memory = torch.from_numpy(pinned().allocate(count * stride))
        return [memory[begin : begin + num_bytes] for begin in range(0, count * stride, stride)]

    def spare(self, num_bytes: int) -> Tensor:
        """Return an unpinned buffer, uint8 [num_bytes]. The GPU driver stages copies to it, which blocks the caller."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def run(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy (target, source) pairs and wait for completion, without blocking other threads."""

        def copy() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        self.wait_for(copy)

    def wait_for(self, work: Callable[[], None]) -> None:
        """Call `work` and wait for what it launches on this stream."""
        if self._stream is None:
            work()
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def in_parts(self, target: Tensor, source: Tensor) -> Iterator[slice]:
        """Copy uint8 [n] to uint8 [n] and yield each part once it is copied, while later parts are in flight."""
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
        """Give the device access to `memory`, uint8 [n] in whole pages mapped by this process, until `unregister`.

        Set `read_only` if the pages are mapped read-only. Raises RegistrationError.
        """
        if self._stream is not None:
            flags = READ_ONLY if read_only else 0
            code = self._call("cudaHostRegister", memory.data_ptr(), len(memory), flags)
            if code:
                raise RegistrationError(f"CUDA cannot register {len(memory):,} bytes: {torch.cuda.CudaError(code)}")
            self._registered[memory.data_ptr()] = pinned().add(len(memory))

    def unregister(self, memory: Tensor) -> None:
        """End the device's access. Call it after the last copy and before unmapping `memory`."""
        if self._stream is not None:
            self._call("cudaHostUnregister", memory.data_ptr())
            pinned().remove(self._registered.pop(memory.data_ptr()))

    def _call(self, function: str, *arguments: int) -> int:
        """Call a CUDA runtime function in a new thread and return its result.

        CUDA stores the last error per thread, and torch would attribute it to the thread's next kernel.
        """

        def call() -> int:
            with torch.cuda.device(self.device):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                return int(getattr(runtime, function)(*arguments))

        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(call).result()
