"""The state of one outgoing KV transfer. Pure; `KVSender` drives it.

opened ──KVGrant──> granted ──blocks computed and shipped──> drained ──KVDone──> finished ──KVAck──> gone
   └──────── KVWait renews the lease ────────┘      KVFailed or an expired lease ends it from any state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.common.messages import KVDone, KVTarget


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """What the sender tells the engine, once per transfer. `reason` is "" when the decode worker acknowledged.

    `exposed_s` is the time from the end of prefill to the acknowledgement. Durations in seconds. `num_bytes` travelled,
    or were there to be copied.
    """

    request_id: str
    attempt: int
    reason: str
    num_shipped: int
    num_skipped: int
    grant_wait_s: float
    transfer_s: float
    exposed_s: float
    shared: bool = False
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TransferAdvanced:
    """A growing transfer was granted, or has `caught_up`: what was computed a moment ago is with the receiver."""

    request_id: str
    attempt: int
    caught_up: bool


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """`num_ready` of `blocks` are computed; `next_block` is the first not shipped (None until granted);
    the receiver had those before `first_block`. `shared`: it copies the blocks itself, given their numbers.
    `quantised`: it takes them as 8-bit numbers. `token` is the secret of its grant.

    A sequence that goes on growing announces `room` blocks, and `blocks` are those it has so far; they are all of them
    once `done` is set. `room` is 0 for a prompt, whose blocks are known from the start.
    """

    request_id: str
    attempt: int
    target: KVTarget
    blocks: Sequence[int]
    opened_at: float
    lease_until: float
    num_ready: int = 0
    room: int = 0
    first_block: int = 0
    next_block: int | None = None
    granted_at: float = 0.0
    done: KVDone | None = None
    done_at: float = 0.0
    done_sent: bool = False
    shared: bool = False
    quantised: bool = False
    num_bytes: int = 0
    stream: int = 0
    announced_at: float = 0.0
    revoked: bool = False
    told_granted: bool = False
    told_caught_up: bool = False
    echo_asked: bool = False
    echoed: bool = False
    token: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    @property
    def num_announced(self) -> int:
        """Blocks that the receiver is asked to have room for."""
        return self.room or len(self.blocks)

    def grant(self, first_block: int, now: float, *, shared: bool = False, quantised: bool = False) -> bool:
        """The decode worker wants blocks from `first_block` on. False for a grant that makes no sense."""
        if self.next_block is not None or not 0 <= first_block <= self.num_announced:
            return False
        self.first_block = self.next_block = first_block
        self.shared, self.quantised = shared, quantised
        self.granted_at = self.announced_at = now
        return True

    def shippable(self, limit: int) -> range:
        """The next at most `limit` block indices that are granted, computed and not shipped yet."""
        if self.next_block is None:
            return range(0)
        return range(self.next_block, max(self.next_block, min(self.num_ready, self.next_block + limit)))

    def advanced(self) -> TransferAdvanced | None:
        """What a growing transfer has to tell its engine now: once that it was granted, once that it caught up."""
        if not self.room or self.next_block is None or self.told_caught_up:
            return None
        if self.told_granted and not self.echoed:
            return None
        self.told_granted, self.told_caught_up = True, self.echoed
        return TransferAdvanced(self.request_id, self.attempt, self.echoed)

    def ended(self, reason: str, now: float) -> TransferEnded:
        """The account of a transfer that is over at `now`."""
        granted_at = self.granted_at or now
        return TransferEnded(
            self.request_id,
            self.attempt,
            reason,
            (self.next_block or self.first_block) - self.first_block,
            self.first_block,
            granted_at - self.opened_at,
            now - granted_at,
            now - self.done_at if self.done_at else 0.0,
            self.shared,
            self.num_bytes,
        )

    @property
    def drained(self) -> bool:
        """Every granted block was handed to the socket and nothing but KVDone is left to say."""
        return self.next_block is not None and self.next_block >= len(self.blocks)

    @property
    def wants_echo(self) -> bool:
        """Whether a growing transfer should ask, behind all blocks that are full, whether they have arrived.

        What was handed to a socket may still be in its queue for long.
        """
        return bool(self.room) and self.computing and not self.echo_asked

    @property
    def computing(self) -> bool:
        """Whether the next move is this worker's own engine's: until then the decode worker owes no answer."""
        return self.next_block is not None and self.done is None and not self.shippable(1)

    @property
    def can_finish(self) -> bool:
        return self.drained and self.done is not None and not self.done_sent
