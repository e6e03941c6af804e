"""The state of one pull of cached blocks from a peer. Pure; `KVPuller` drives it."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.kv.tiers import BlockRead
from common.wire.messages import KVBlocks, KVPeer, KVPull

AHEAD = 4
"""Messages full of blocks that are asked for before the first of them has come."""


@dataclass(slots=True, eq=False)
class Pull:
    """The blocks of `read` are to come from `peer`, in order. `token` is this pull's secret.

    The first `num_asked` of them were asked for, of the layout `fingerprint`; `num_bytes` have come. With `shared` they
    are copied out of the peer's memory. Times are engine clock, in seconds.
    """

    read: BlockRead
    peer: KVPeer
    fingerprint: str
    token: int
    began: float
    num_asked: int = 0
    num_bytes: int = 0
    shared: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.read.request_id, self.read.attempt)

    @property
    def is_whole(self) -> bool:
        return self.read.num_done == len(self.read.blocks)

    def opening(self) -> KVPull:
        """Asks the peer what it offers."""
        return self._message(b"")

    def next_ask(self, batch: int) -> KVPull | None:
        """The next `batch` blocks to ask for; None while enough are on their way, or all were asked for."""
        begin, end = self.num_asked, min(self.num_asked + batch, len(self.read.hashes))
        if begin == end or begin - self.read.num_done > (AHEAD - 1) * batch:
            return None
        self.num_asked = end
        return self._message(b"".join(self.read.hashes[begin:end]), begin)

    def mismatch(self, header: KVBlocks) -> str:
        """Why the blocks behind a header are not the next ones, or ""."""
        last = header.first_block + len(header.checksums)
        if header.first_block != self.read.num_done or last > self.num_asked:
            wanted = f"{self.read.num_done} to {self.num_asked}"
            return f"blocks {header.first_block} to {last} came, those from {wanted} were asked for"
        return ""

    def _message(self, hashes: bytes, first_block: int = 0) -> KVPull:
        return KVPull(
            request_id=self.read.request_id,
            attempt=self.read.attempt,
            epoch=self.peer.epoch,
            fingerprint=self.fingerprint,
            first_block=first_block,
            hashes=hashes,
            token=self.token,
            shared=self.shared,
        )
