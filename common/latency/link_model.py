"""KV transfer time from one worker to another as a function of its size. Pure.

    seconds = latency + byte * bytes

This is the postal model of a link (Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994). It is
fitted to the part of transfers that prefill does not hide: from the end of the prompt, or from the grant if later, to
the last block, and the bytes received in that time.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.latency.step_model import LARGEST_COST, Cost
from common.observe import Ewma

DECAY = 0.98
"""Weight of a transfer relative to the next one."""
SHORTEST_S = 1e-3
"""Lower bound for relative errors, in seconds. Below it, wake-up latency dominates."""
WORTHWHILE = 0.8
"""Maximum time of a pull as a fraction of the time to compute the blocks. Predictions have errors, and a pull also
costs the peer."""
LINK_ERROR_SMOOTHING = 0.05
"""Smoothing factor of the average error."""


class LinkModel(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Coefficients, in seconds, of one transport to one worker.

    A block has `block_bytes` bytes on the wire. `error` is the recent average of |predicted - measured| / measured for
    new transfers. `num_transfers` were observed; 0 means unknown.
    """

    latency_s: Cost = 0.0
    byte_s: Cost = 0.0
    block_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    error: Cost = 0.0
    num_transfers: Annotated[int, Meta(ge=0, le=2**62)] = 0

    @property
    def is_known(self) -> bool:
        return self.num_transfers > 0

    def seconds(self, num_blocks: int) -> float:
        """Return the transfer time of `num_blocks` blocks that are all available at the start."""
        return self.latency_s + self.byte_s * self.block_bytes * num_blocks


class Links(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Models of the transports to a worker: TCP, shared memory, its own disk, and the caches of peers.

    `disk` and `peer` have assumed values before the first read and the first pull. Their `block_bytes` is 0 for a
    worker without a tier, or one that does not pull.
    """

    tcp: LinkModel = LinkModel()
    shm: LinkModel = LinkModel()
    disk: LinkModel = LinkModel()
    peer: LinkModel = LinkModel()

    @property
    def usual(self) -> LinkModel:
        """Model of the transport by which more transfers from other workers arrived."""
        return self.shm if self.shm.num_transfers > self.tcp.num_transfers else self.tcp


class LinkFit:
    """Fits a `LinkModel` to observed transfers. `model` is the latest fit.

    Uses non-negative least squares of the relative error, so a stall has little weight.
    """

    def __init__(self) -> None:
        self._weight = self._bytes = self._squares = self._time = self._products = 0.0
        self._error = Ewma(LINK_ERROR_SMOOTHING)
        self.model = LinkModel()

    def observe(self, num_bytes: int, seconds: float, block_bytes: int) -> None:
        """Record a transfer of `num_bytes` in blocks of `block_bytes`.

        With 0 bytes, only the last message was waited for.
        """
        if seconds < 0.0 or num_bytes < 0:
            return
        known = self.model
        if known.is_known:
            off_s = abs(known.latency_s + known.byte_s * num_bytes - seconds)
            self._error.observe(min(1.0, off_s / max(SHORTEST_S, seconds)))
        weight = 1.0 / max(SHORTEST_S, seconds) ** 2
        self._weight = DECAY * self._weight + weight
        self._bytes = DECAY * self._bytes + weight * num_bytes
        self._squares = DECAY * self._squares + weight * num_bytes * num_bytes
        self._time = DECAY * self._time + weight * seconds
        self._products = DECAY * self._products + weight * seconds * num_bytes
        latency_s, byte_s = (min(LARGEST_COST, cost) for cost in self._solved())  # larger values invalidate a heartbeat
        self.model = LinkModel(
            latency_s=latency_s,
            byte_s=byte_s,
            block_bytes=block_bytes or known.block_bytes,
            error=self._error.value,
            num_transfers=known.num_transfers + 1,
        )

    def _solved(self) -> tuple[float, float]:
        """Return latency and time per byte.

        Transfers of a single size determine only the sum: it is attributed to bytes.
        """
        spread = self._weight * self._squares - self._bytes**2
        if spread > 1e-6 * self._weight * self._squares:
            byte_s = (self._weight * self._products - self._bytes * self._time) / spread
            latency_s = (self._time - byte_s * self._bytes) / self._weight
            if byte_s >= 0.0 and latency_s >= 0.0:
                return latency_s, byte_s
            if byte_s < 0.0:
                return self._time / self._weight, 0.0
        if self._squares:
            return 0.0, self._products / self._squares
        return self._time / self._weight, 0.0


class LinkFits:
    """One fit per transport."""

    def __init__(self) -> None:
        self._tcp, self._shm = LinkFit(), LinkFit()

    def observe(self, num_bytes: int, seconds: float, block_bytes: int, *, shared: bool) -> None:
        """See `LinkFit.observe`. `shared`: received through shared memory."""
        (self._shm if shared else self._tcp).observe(num_bytes, seconds, block_bytes)

    @property
    def links(self) -> Links:
        return Links(tcp=self._tcp.model, shm=self._shm.model)
