"""One worker as the router sees it: who it says it is, how it says it is, and what was booked on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.observe.ewma import Ewma
from common.wire.message_fields import Role
from common.wire.messages import WorkerHeartbeat, WorkerHello

SERVICE_SMOOTHING = 0.1
"""What one more request counts in the average time that requests are decoded on a worker."""


class WorkerState(StrEnum):
    """unknown ─ hello ─> connected ─ heartbeat ─> ready <─> draining; dead when silent or stuck, until it speaks."""

    UNKNOWN = "unknown"
    CONNECTED = "connected"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Booking:
    """Work sent to a worker and not yet known to be over."""

    serial: int
    address: str
    num_tokens: int
    num_blocks: int


@dataclass(slots=True)
class Load:
    """Sums over bookings: requests, uncached prompt tokens, KV blocks."""

    num_requests: int = 0
    num_tokens: int = 0
    num_blocks: int = 0

    def add(self, booking: Booking, sign: int) -> None:
        self.num_requests += sign
        self.num_tokens += sign * booking.num_tokens
        self.num_blocks += sign * booking.num_blocks


@dataclass(slots=True)
class Worker:
    """State of one configured address. Only `WorkerRegistry` changes it.

    `suspect`: it failed several requests in a row. One that fails fast looks idle and would draw all traffic.
    `withheld`: why discovery wants it to get nothing new, whatever it says itself; "" while it may.
    `forgiven_at`: what `last_seen` was set to when its silence was last forgiven; it has lasted since `silent_since`.
    `service_s`: how long, lately, a request was decoded there; 0 before the first.

    Load is counted when booked and when reported, whichever is more: `max(all bookings, reported + fresh)`, where
    `fresh` is what was booked since the report, less what was over since. With one router the bookings are exact, with
    several the report carries what the others sent.
    """

    address: str
    role: Role
    state: WorkerState = WorkerState.UNKNOWN
    reason: str = "never heard from"
    withheld: str = ""
    hello: WorkerHello | None = None
    beat: WorkerHeartbeat | None = None
    known_epoch: int | None = None
    last_seen: float | None = None
    forgiven_at: float | None = None
    silent_since: float = 0.0
    step_changed: float = 0.0
    idle_since: float | None = None
    num_dispatched: int = 0
    num_strikes: int = 0
    suspect_until: float = 0.0
    suspect: bool = False
    service_s: Ewma = field(default_factory=lambda: Ewma(SERVICE_SMOOTHING))
    bookings: dict[int, Booking] = field(default_factory=dict)
    booked: Load = field(default_factory=Load)
    fresh: Load = field(default_factory=Load)

    @property
    def ready(self) -> bool:
        return self.state is WorkerState.READY and not self.withheld

    @property
    def shown_state(self) -> str:
        """The state for people and metrics."""
        return "withheld" if self.withheld and self.state is WorkerState.READY else str(self.state)

    @property
    def identity(self) -> WorkerHello:
        """The hello of a worker that has said one. Raises RuntimeError for any other: a bug in the caller."""
        if self.hello is None:
            raise RuntimeError(f"{self.address} has not said hello")
        return self.hello

    @property
    def epoch(self) -> int:
        return self.identity.epoch

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id if self.hello else ""

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and answer, that the worker takes."""
        hello = self.identity
        return min(hello.max_model_len, hello.num_blocks * hello.block_size)

    @property
    def num_requests(self) -> int:
        """Requests running, waiting or on their way."""
        beat = self.beat
        reported = beat.num_running + beat.num_waiting + beat.num_transferring if beat else 0
        return max(self.booked.num_requests, reported + self.fresh.num_requests)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that must be computed before a new request's turn."""
        reported = self.beat.num_waiting_tokens if self.beat else 0
        return max(self.booked.num_tokens, reported + self.fresh.num_tokens)

    @property
    def num_available_blocks(self) -> int:
        """Blocks a new request could get: free or evictable, less those promised since the last report."""
        total = self.hello.num_blocks if self.hello else 0
        reported = self.beat.num_free_blocks + self.beat.num_cached_blocks if self.beat else total
        return max(0, min(reported - self.fresh.num_blocks, total - self.booked.num_blocks))

    def forgive(self, now: float, longest_s: float) -> bool:
        """Take the worker for one heard just now, unless its silence has lasted for longer than `longest_s`."""
        if self.last_seen != self.forgiven_at:
            self.silent_since = self.last_seen or 0.0
        if now - self.silent_since > longest_s and self.last_seen == self.forgiven_at:
            return False
        self.last_seen = self.forgiven_at = now
        return True

    def describe(self, now: float) -> str:
        """The worker in a few words for people, such as "tcp://10.0.0.7:7001 silent for 3.1 s"."""
        if self.state is WorkerState.READY:
            return f"{self.address} {self.withheld or 'ready'}"
        if self.state is WorkerState.DEAD and self.last_seen is not None:
            return f"{self.address} {self.reason}, last heard {now - self.last_seen:.1f} s ago"
        return f"{self.address} {self.reason}"
