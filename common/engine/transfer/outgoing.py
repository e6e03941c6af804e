"""The state of one outgoing KV transfer. Pure; `KVSender` drives it.

opened ──KVGrant──> granted ──blocks computed and shipped──> drained ──KVDone──> finished ──KVAck──> gone
   └──────── KVWait renews the lease ────────┘      KVFailed or an expired lease ends it from any state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from common.wire.messages import KVDone, KVTarget


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The sender tells the engine once per transfer. `reason` is "" when the decode worker acknowledged.

    `exposed_s` is the time from the end of prefill to the acknowledgement. Durations in seconds. `num_bytes` were sent,
    or offered for copying. `transport` is tcp, shm, nixl or cuda-ipc.
    """

    request_id: str
    attempt: int
    reason: str
    num_shipped: int
    num_skipped: int
    grant_wait_s: float
    transfer_s: float
    exposed_s: float
    transport: str = "tcp"
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TransferAdvanced:
    """A growing transfer was granted, or has `caught_up`: the receiver has all blocks that were full a moment ago."""

    request_id: str
    attempt: int
    caught_up: bool


class TransferState(Enum):
    OPENED = auto()
    """The receiver was asked for room."""
    GRANTED = auto()
    """Blocks are shipped as they are computed."""
    FINISHED = auto()
    """All blocks and `KVDone` are sent; the receiver has to acknowledge."""


class CatchUp(Enum):
    """How far a growing transfer is: its sequence may pause once the receiver has all full blocks."""

    NOT_GRANTED = auto()
    GRANTED = auto()
    """The engine heard of the grant."""
    ASKED = auto()
    """The sender asked, behind the full blocks, whether they have arrived."""
    ANSWERED = auto()
    COMPLETE = auto()
    """The engine heard of the answer."""


class Way(Enum):
    """How blocks travel."""

    FRAMES = auto()
    SMALL_FRAMES = auto()
    """Frames of 8-bit numbers."""
    SHARED = auto()
    """The receiver copies them out of this worker's memory, given their numbers."""
    REMOTE = auto()
    """The same with NIXL, from another host."""
    DEVICE = auto()
    """The receiver's GPU copies them out of this worker's."""

    @property
    def is_numbered(self) -> bool:
        """Whether blocks travel as numbers."""
        return self in (Way.SHARED, Way.REMOTE, Way.DEVICE)

    @property
    def transport(self) -> str:
        return {Way.SHARED: "shm", Way.REMOTE: "nixl", Way.DEVICE: "cuda-ipc"}.get(self, "tcp")


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One prompt, or one growing sequence, on its way to a decode worker.

    `num_ready` of `blocks` are computed; once granted, `next_block` is the first not shipped. The receiver had those
    before `first_block`. `token` is the secret of the grant. `revoked`: the engine took the blocks back. The engine's
    thread alone sets that, under the sender's lock.

    A growing sequence announces `room` blocks; `blocks` are those it has so far, and all of them once `done` is set.
    `room` is 0 for a prompt, whose blocks are known from the start, or a hole stands for one that is computed later.

    Nothing before `first_kept` is lent: it is out of the model's window.
    """

    request_id: str
    attempt: int
    target: KVTarget
    blocks: Sequence[int]
    opened_at: float
    lease_until: float
    num_ready: int = 0
    room: int = 0
    first_kept: int = 0
    state: TransferState = TransferState.OPENED
    way: Way = Way.FRAMES
    catch_up: CatchUp = CatchUp.NOT_GRANTED
    first_block: int = 0
    next_block: int = 0
    granted_at: float = 0.0
    done: KVDone | None = None
    done_at: float = 0.0
    num_bytes: int = 0
    stream: int = 0
    announced_at: float = 0.0
    revoked: bool = False
    token: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    @property
    def num_announced(self) -> int:
        """Blocks that the receiver is asked to have room for."""
        return self.room or len(self.blocks)

    @property
    def announced(self) -> str:
        """The blocks that may be granted, in words."""
        return f"{self.first_kept} to {self.num_announced}"

    def grant(self, first_block: int, now: float, way: Way = Way.FRAMES) -> bool:
        """The decode worker wants blocks from `first_block` on. False for an impossible grant."""
        if self.state is not TransferState.OPENED or not self.first_kept <= first_block <= self.num_announced:
            return False
        self.state, self.way = TransferState.GRANTED, way
        self.first_block = self.next_block = first_block
        self.granted_at = self.announced_at = now
        return True

    def finish(self) -> None:
        """`KVDone` was sent."""
        self.state = TransferState.FINISHED

    def ask(self) -> None:
        """The sender asked, behind all full blocks, whether they have arrived."""
        if self.catch_up is CatchUp.GRANTED:
            self.catch_up = CatchUp.ASKED

    def answer(self) -> None:
        """The receiver confirmed that they have arrived. It also sends this message unasked, which means nothing."""
        if self.catch_up is CatchUp.ASKED:
            self.catch_up = CatchUp.ANSWERED

    def shippable(self, limit: int) -> range:
        """The next at most `limit` block indices that are granted, computed and not shipped yet."""
        if self.state is TransferState.OPENED:
            return range(0)
        return range(self.next_block, max(self.next_block, min(self.num_ready, self.next_block + limit)))

    def advanced(self) -> TransferAdvanced | None:
        """The event that the engine must hear now, if any: once that it was granted, once that it caught up."""
        if not self.room or self.state is TransferState.OPENED:
            return None
        following = {CatchUp.NOT_GRANTED: CatchUp.GRANTED, CatchUp.ANSWERED: CatchUp.COMPLETE}.get(self.catch_up)
        if following is None:
            return None
        self.catch_up = following
        return TransferAdvanced(self.request_id, self.attempt, following is CatchUp.COMPLETE)

    def ended(self, reason: str, now: float) -> TransferEnded:
        """The event of a transfer that ends at `now`."""
        granted_at = self.granted_at or now
        return TransferEnded(
            self.request_id,
            self.attempt,
            reason,
            self.next_block - self.first_block,
            max(0, self.first_block - self.first_kept),
            granted_at - self.opened_at,
            now - granted_at,
            now - self.done_at if self.done_at else 0.0,
            self.way.transport,
            self.num_bytes,
        )

    @property
    def drained(self) -> bool:
        """Whether every granted block was handed to the socket, so that only KVDone is left to send."""
        return self.state is not TransferState.OPENED and self.next_block >= len(self.blocks)

    @property
    def wants_echo(self) -> bool:
        """Whether a growing transfer should ask, behind all full blocks, whether they have arrived.

        Blocks that were handed to a socket may wait in its queue for long.
        """
        return bool(self.room) and self.computing and self.catch_up is CatchUp.GRANTED

    @property
    def computing(self) -> bool:
        """Whether this worker's engine must compute first: until then the decode worker owes no answer."""
        return self.state is TransferState.GRANTED and self.done is None and not self.shippable(1)

    @property
    def can_finish(self) -> bool:
        return self.state is TransferState.GRANTED and self.drained and self.done is not None
