"""One copy of equal weights for all processes of a host, in an anonymous memory file.

Weights are found by their contents: the process that packs a matrix first appends it, and the others drop their own
copy. So it does not matter which processes serve the same model with the same settings, nor in which order they start
or end. The file begins with an index: the number of entries, then entries of hash, place and size. An entry is counted
only after its contents are written. All processes map the file read-only. Entries are never freed, so each process
appends only the first model that it loads, not the weights of updates.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.large_pages import LARGE_PAGE, LINE

log = logging.getLogger("kernels")

COUNT: Final = struct.Struct("<Q")
ENTRY: Final = struct.Struct("<16sQQ")
INDEX_BYTES: Final = 2 * LARGE_PAGE
MAX_ENTRIES: Final = INDEX_BYTES // ENTRY.size - 2
PAST_END: Final = 4096
"""Bytes after each entry that a prefetch may touch."""
LOCK_S: Final = 30.0
"""Maximum wait for another process that appends, in seconds. Then the weights stay private."""
MADV_COLLAPSE: Final = 25
"""Option of madvise on Linux, from 6.1 on."""
MAP_FIXED: Final = 0x10


class WeightsFile:
    """A process's view of the file at `path`. Thread-safe. Raises OSError if it cannot be opened or mapped."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._size = os.fstat(self._fd).st_size
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._address = self._map()
        place = (ctypes.c_ubyte * self._size).from_address(self._address)
        self._memory = torch.frombuffer(place, dtype=torch.uint8)
        self._known: dict[tuple[bytes, int], int] = {}
        self._num_entries, self._end = 0, INDEX_BYTES
        self.appends = True
        """Whether weights that the file does not have are appended. Otherwise they stay private."""
        self._threads = threading.Lock()

    def _map(self) -> int:
        """Map the file read-only, aligned to large pages."""
        call = self._libc.mmap
        call.restype = ctypes.c_void_p
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        reserved = call(None, self._size + LARGE_PAGE, 0, private, -1, 0)
        if reserved in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "cannot reserve addresses")
        aligned = -(-int(reserved) // LARGE_PAGE) * LARGE_PAGE
        if call(aligned, self._size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, self._fd, 0) != aligned:
            raise OSError(ctypes.get_errno(), "cannot map the file")
        return aligned

    def has_large_pages(self) -> bool:
        """Whether this system stores the file in large pages. Without them, steps would read weights more slowly."""
        try:
            os.pwrite(self._fd, b"\0", INDEX_BYTES - 1)  # of no entry; a range without any page cannot be collapsed
        except OSError:
            return False
        return self._collapse(INDEX_BYTES - LARGE_PAGE, INDEX_BYTES)

    def shared(self, weights: Tensor) -> Tensor:
        """Return the read-only copy of contiguous `weights`, or `weights` if they cannot be shared."""
        num_bytes = weights.numel() * weights.element_size()
        if not num_bytes or weights.device.type != "cpu" or not weights.is_contiguous():
            return weights
        from xxhash import xxh3_128_digest  # not needed by benchmarks of the kernels

        flat = weights.view(-1).view(torch.uint8)
        digest = xxh3_128_digest(flat.numpy().data)
        try:
            with self._threads, self._turn():
                begin = self._find(digest, num_bytes)
                if begin is None:
                    if not self.appends:
                        return weights
                    begin = self._append(digest, flat)
        except OSError as error:
            log.warning("weights are not shared with other workers of this host: %s", error)
            return weights
        copy = self._memory[begin : begin + num_bytes]
        return copy.view(weights.dtype).view(weights.shape) if torch.equal(copy, flat) else weights

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Exclude other processes. The kernel releases the lock of a dead process. Raises TimeoutError."""
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another worker holds the lock for more than {LOCK_S:g} s") from None
                time.sleep(0.005)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _find(self, digest: bytes, num_bytes: int) -> int | None:
        (count,) = COUNT.unpack(os.pread(self._fd, COUNT.size, 0))
        for index in range(self._num_entries, count):
            name, begin, size = ENTRY.unpack(os.pread(self._fd, ENTRY.size, (1 + index) * ENTRY.size))
            self._known[name, size], self._end = begin, begin + size + PAST_END
        self._num_entries = count
        return self._known.get((digest, num_bytes))

    def _append(self, digest: bytes, flat: Tensor) -> int:
        begin, num_bytes = -(-self._end // LINE) * LINE, flat.numel()
        if begin + num_bytes + PAST_END > self._size or self._num_entries == MAX_ENTRIES:
            raise OSError("the memory file is full")
        contents, written = flat.numpy().data, 0
        while written < num_bytes:
            written += os.pwrite(self._fd, contents[written:], begin + written)
        os.pwrite(self._fd, ENTRY.pack(digest, begin, num_bytes), (1 + self._num_entries) * ENTRY.size)
        os.pwrite(self._fd, COUNT.pack(self._num_entries + 1), 0)
        whole = [place // LARGE_PAGE * LARGE_PAGE for place in (self._end, begin + num_bytes)]
        self._collapse(*whole)
        self._find(digest, num_bytes)
        return begin

    def _collapse(self, begin: int, end: int) -> bool:
        """Store a range of the file in large pages. Returns False if that is not possible."""
        place = ctypes.c_void_p(self._address + begin), ctypes.c_size_t(end - begin)
        return begin == end or self._libc.madvise(*place, MADV_COLLAPSE) == 0


_file: WeightsFile | None = None
_path = ""


def share_weights(path: str) -> None:
    """Share weights that are packed from now on with the processes that use the same memory file, unless path is "".

    Call it before each model is loaded. Only the first one is appended to the file; later ones share what it has.
    """
    global _file, _path
    if _path and _file is not None:
        _file.appends = False
    if _path or not path:
        return
    _path = path
    try:
        found = WeightsFile(path)
    except OSError as error:
        log.info("weights are not shared with other workers of this host: %s", error)
        return
    if found.has_large_pages():
        _file = found
    else:
        log.info("weights are not shared with other workers of this host: Linux has no large pages for shared memory")


def is_sharing() -> bool:
    """Whether all weights are shared, so that a private copy is only temporary."""
    return _file is not None and _file.appends


def shared(weights: Tensor) -> Tensor:
    """Return `weights`, or the read-only copy that all processes of `share_weights` use."""
    return weights if _file is None else _file.shared(weights)
