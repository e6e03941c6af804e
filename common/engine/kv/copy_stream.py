"""Copies between a device and host memory: all that transfers ask of CUDA. On the CPU they are plain copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from common.errors import DiptychError
from kernels.interface import PIECE_ALIGN_BYTES, pinned

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
        self._registered: dict[int, int] = {}  # address -> number in the count of pinned memory
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        """The stream in the driver's calls; 0 on a CPU."""
        return self._stream.cuda_stream if self._stream is not None else 0

    @property
    def pins(self) -> bool:
        """Whether the device reaches host memory directly only where that is pinned."""
        return self._stream is not None

    def buffers(self, num_bytes: int, count: int) -> list[Tensor]:
        """`count` buffers, uint8 [num_bytes] each, that the device reaches directly. Pins memory: at a start alone."""
        if not self.pins:
            return [self.spare(num_bytes) for _ in range(count)]
        stride = -(-num_bytes // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES
        memory = torch.from_numpy(pinned().allocate(count * stride))
        return [memory[begin : begin + num_bytes] for begin in range(0, count * stride, stride)]

    def spare(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] that is not pinned: a GPU's driver copies through memory of its own, and blocks."""
        return torch.empty(num_bytes, dtype=torch.uint8)

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
            self._registered[memory.data_ptr()] = pinned().add(len(memory))

    def unregister(self, memory: Tensor) -> None:
        """Ends the device's access. Call it after the last copy and before `memory` is unmapped."""
        if self._stream is not None:
            self._call("cudaHostUnregister", memory.data_ptr())
            pinned().remove(self._registered.pop(memory.data_ptr()))

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
