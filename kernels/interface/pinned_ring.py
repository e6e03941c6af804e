"""Memory for copies between the host and a device, allocated once and handed out in order.

    [ free | read by the device | written by the host | free ]
             oldest ──────────────────────> newest

A piece is free again when an event reports that the device has finished its copy and the host holds no reference to it.
Copies to the device are written before the copy is launched. Copies from the device are read after it completes.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

log = logging.getLogger(__name__)
PIECE_ALIGN_BYTES = 64
"""Alignment of pieces, sufficient for views of any type."""
WAIT_S = 60.0
"""Maximum time, in seconds, to wait for the copies of older pieces, which queue after at most two steps."""
POLL_S = 5e-5


class Mark(Protocol):
    """A point in the device's queue of work, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has reached this point. Raises RuntimeError if the device failed."""


class CopyLate(RuntimeError):
    """The device did not finish a copy within the time limit."""


@dataclass(slots=True, eq=False)
class Loan:
    """Bytes `begin` to `end` of the ring, or separate memory in `own`. In use by the host while `holder` is alive."""

    begin: int
    end: int
    holder: weakref.ref[np.ndarray]
    own: np.ndarray | None = None
    mark: Mark | None = None

    @property
    def is_held(self) -> bool:
        return self.holder() is not None

    @property
    def is_over(self) -> bool:
        return not self.is_held and (self.mark is None or self.mark.query())


class PinnedPiece(NamedTuple):
    """A piece of pinned memory, uint8. Returned to the ring when this array and all views and tensors are dropped."""

    memory: np.ndarray
    loan: Loan


class PinnedRing:
    """Ring buffer of pinned memory. Thread-safe; a thread that waits for free memory blocks the others."""

    def __init__(
        self,
        memory: np.ndarray,
        allocate: Callable[[int], np.ndarray],
        mark: Callable[[torch.device], Mark],
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        """`memory` is uint8. `allocate` allocates pieces that do not fit. `mark` records an event after the device's
        current work."""
        self.num_bytes = len(memory)
        self._memory, self._allocate, self._mark, self._wait_s = memory, allocate, mark, wait_s
        self._lent: deque[Loan] = deque()  # in order
        self._own: list[Loan] = []
        self._next = 0
        self._has_told = False
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> PinnedPiece:
        """Return an uninitialised piece.

        If the ring is full, waits for the copies of older pieces. If the piece does not fit, or would have to wait for
        a piece that the host still references, allocates separate memory. Raises CopyLate or the device's RuntimeError.
        """
        size = -(-max(1, num_bytes) // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES
        with self._lock:
            self._reclaim()
            while size <= self.num_bytes:
                if (begin := self._room(size)) is not None:
                    memory = self._memory[begin : begin + num_bytes]
                    loan = Loan(begin, begin + size, weakref.ref(memory))
                    self._lent.append(loan)
                    self._next = loan.end
                    return PinnedPiece(memory, loan)
                if self._lent[0].is_held:
                    break
                self._wait_for(self._lent[0])
                self._reclaim()
            return self._take_own(num_bytes)

    def launched(self, piece: PinnedPiece, device: torch.device) -> None:
        """Record that the copy of a piece was launched on the device's current stream."""
        piece.loan.mark = self._mark(device)

    def drain(self) -> None:
        """Wait for all copies, before the memory is freed. Raises the same errors as `take`."""
        with self._lock:
            for loan in (*self._lent, *self._own):
                self._wait_for(loan)

    def check_integrity(self) -> None:
        """Raise ValueError if two lent pieces overlap or are not in ring order."""
        with self._lock:
            lent = [(loan.begin, loan.end) for loan in self._lent]
        spans, num_turns = sorted(lent), sum(later < former for former, later in pairwise(lent))
        if num_turns > 1 or any(later[0] < former[1] for former, later in pairwise([*spans, (self.num_bytes, 0)])):
            raise ValueError(f"overlapping or misordered pieces in a ring of {self.num_bytes} bytes: {lent}")

    def _room(self, size: int) -> int | None:
        """Find a free region of `size` contiguous bytes after the newest piece."""
        if not self._lent:
            return 0
        oldest, after = self._lent[0].begin, self._next
        if after <= oldest:
            return after if oldest - after >= size else None
        if self.num_bytes - after >= size:
            return after
        return 0 if oldest >= size else None

    def _reclaim(self) -> None:
        while self._lent and self._lent[0].is_over:
            self._lent.popleft()
        if self._own:
            self._own = [loan for loan in self._own if not loan.is_over]

    def _wait_for(self, loan: Loan) -> None:
        if loan.mark is None:
            return
        until = time.monotonic() + self._wait_s
        while not loan.mark.query():
            if time.monotonic() > until:
                raise CopyLate(f"the device has not copied {loan.end - loan.begin:,} bytes within {self._wait_s:g} s")
            time.sleep(POLL_S)

    def _take_own(self, num_bytes: int) -> PinnedPiece:
        if not self._has_told:
            self._has_told = True
            log.warning(
                "a copy of %s bytes does not fit into the pinned ring of %s bytes, %s of which are in use: pinning "
                "separate memory for it, which delays steps; this warning is logged once",
                *(f"{number:,}" for number in (num_bytes, self.num_bytes, sum(x.end - x.begin for x in self._lent))),
            )
        own = self._allocate(max(1, num_bytes))
        memory = own[:num_bytes]
        loan = Loan(0, num_bytes, weakref.ref(memory), own)
        self._own.append(loan)
        return PinnedPiece(memory, loan)
