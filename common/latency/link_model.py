"""The time that the KV of a prompt takes from one worker to another, as a function of its bytes. Pure.

    seconds = latency + byte * bytes

This is the postal model of a link (Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994). What
is measured is the time that prefill does not hide: from the end of the prompt, or from the grant if that is later, to
the last block, and the bytes that arrived in it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.latency.step_model import LARGEST_COST, Cost
from common.observe import Ewma

DECAY = 0.98
"""What an earlier transfer counts for beside the next one."""
SHORTEST_S = 1e-3
"""Below that, wake-ups decide: errors are not taken relative to less."""
WORTHWHILE = 0.8
"""Of the time of computing blocks, that a pull of them may take: predictions err, and a pull costs the peer, too."""
LINK_ERROR_SMOOTHING = 0.05
"""The share of one more transfer in the average error."""


class LinkModel(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The coefficients, in seconds, of what one worker receives in one way.

    A block takes `block_bytes` bytes on that way. `error`: the recent average of |predicted - measured| / measured, of
    transfers that the model had not seen. `num_transfers` were observed; 0 says that nothing is known.
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
        """The time of so many blocks that are all there at its begin."""
        return self.latency_s + self.byte_s * self.block_bytes * num_blocks


class Links(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a worker knows of each way in which KV reaches it: over TCP, through shared memory, from its own disk, and
    from the caches of peers.

    `disk` has no bytes in a block for a worker without a tier, and assumptions before its first read; so has `peer` for
    one that does not pull, and before its first pull.
    """

    tcp: LinkModel = LinkModel()
    shm: LinkModel = LinkModel()
    disk: LinkModel = LinkModel()
    peer: LinkModel = LinkModel()

    @property
    def usual(self) -> LinkModel:
        """That of the way by which more came from others."""
        return self.shm if self.shm.num_transfers > self.tcp.num_transfers else self.tcp


class LinkFit:
    """Observes transfers of one way; `model` is the latest fit.

    It is the non-negative least-squares fit in relative error, so a stall counts for little.
    """

    def __init__(self) -> None:
        self._weight = self._bytes = self._squares = self._time = self._products = 0.0
        self._error = Ewma(LINK_ERROR_SMOOTHING)
        self.model = LinkModel()

    def observe(self, num_bytes: int, seconds: float, block_bytes: int) -> None:
        """`num_bytes` in blocks of `block_bytes` took so many seconds; there may be none, but of the last message."""
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
        latency_s, byte_s = (min(LARGEST_COST, cost) for cost in self._solved())  # beyond it, a heartbeat is dropped
        self.model = LinkModel(
            latency_s=latency_s,
            byte_s=byte_s,
            block_bytes=block_bytes or known.block_bytes,
            error=self._error.value,
            num_transfers=known.num_transfers + 1,
        )

    def _solved(self) -> tuple[float, float]:
        """Latency and time of a byte. Transfers of one size tell only their sum: then bytes take all of it."""
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
    """One fit for each way."""

    def __init__(self) -> None:
        self._tcp, self._shm = LinkFit(), LinkFit()

    def observe(self, num_bytes: int, seconds: float, block_bytes: int, *, shared: bool) -> None:
        """See `LinkFit.observe`. `shared`: the bytes came through shared memory."""
        (self._shm if shared else self._tcp).observe(num_bytes, seconds, block_bytes)

    @property
    def links(self) -> Links:
        return Links(tcp=self._tcp.model, shm=self._shm.model)
