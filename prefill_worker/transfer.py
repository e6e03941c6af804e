"""The state of one outgoing KV transfer. Pure; `KVSender` drives it.

opened ──KVGrant──> granted ──blocks computed and shipped──> drained ──KVDone──> finished ──KVAck──> gone
   └──────── KVWait renews the lease ────────┘      KVFailed or an expired lease ends it from any state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.common.messages import KVDone, KVTarget


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """`num_ready` of `blocks` are computed; `next_block` is the first not shipped (None until granted);
    the receiver had those before `first_block`. `shared`: it copies the blocks itself, given their numbers."""

    request_id: str
    attempt: int
    target: KVTarget
    blocks: Sequence[int]
    opened_at: float
    lease_until: float
    num_ready: int = 0
    first_block: int = 0
    next_block: int | None = None
    granted_at: float = 0.0
    done: KVDone | None = None
    done_at: float = 0.0
    done_sent: bool = False
    shared: bool = False
    stream: int = 0
    announced_at: float = 0.0
    revoked: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    def grant(self, first_block: int, now: float, *, shared: bool = False) -> bool:
        """The decode worker wants blocks from `first_block` on. False for a grant that makes no sense."""
        if self.next_block is not None or not 0 <= first_block <= len(self.blocks):
            return False
        self.first_block = self.next_block = first_block
        self.shared = shared
        self.granted_at = self.announced_at = now
        return True

    def shippable(self, limit: int) -> range:
        """The next at most `limit` block indices that are granted, computed and not shipped yet."""
        if self.next_block is None:
            return range(0)
        return range(self.next_block, max(self.next_block, min(self.num_ready, self.next_block + limit)))

    @property
    def drained(self) -> bool:
        """Every granted block was handed to the socket and nothing but KVDone is left to say."""
        return self.next_block is not None and self.next_block == len(self.blocks)

    @property
    def computing(self) -> bool:
        """Whether the next move is this worker's own engine's: until then the decode worker owes no answer."""
        return self.next_block is not None and self.done is None and not self.shippable(1)

    @property
    def can_finish(self) -> bool:
        return self.drained and self.done is not None and not self.done_sent
