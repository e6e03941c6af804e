"""One worker as the router sees it: its identity, its last report, and the work booked on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from common.blocks import Window
from common.latency import LinkModel, StepModel
from common.observe import Ewma
from common.wire import ROLES, Role
from common.wire.messages import AdapterState, WorkerHeartbeat, WorkerHello
from router.fleet.booking import Booking, Load, PromptSizes, peak_growth

SMOOTHING = 0.1
"""The share of one more request in a worker's averages."""
FEW_BLOCKS = 0.1
"""Of a worker's blocks: growth by so many is not worth a closer look."""


class WorkerState(StrEnum):
    """unknown ─ hello ─> connected ─ heartbeat ─> ready <─> draining; dead while silent or stuck."""

    UNKNOWN = "unknown"
    CONNECTED = "connected"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


READY = WorkerState.READY  # each look at a member of an enum class costs as much as the rest of `Worker.ready`


@dataclass(slots=True)
class Worker:
    """State of one address. Only `WorkerRegistry` changes it.

    `role` is the present one, as its hello says; `home` the one under which it was configured or found, with which its
    process starts.

    `suspect`: it failed several requests in a row. A worker that fails fast looks idle and would draw all traffic.
    `unreadable`: why its last frame was dropped; "" once it has sent a heartbeat that could be read.
    `withheld`: why discovery lets it have no new work; "" while it may have some.
    `has_served`: it has been ready in its present life.
    `forgiven_at`: what `last_seen` was set to when its silence was last forgiven; it has lasted since `silent_since`.
    `service_s`: the recent average of how long it decodes a request; 0 before the first.
    `lateness`: the recent average of the logarithm of how many times later than predicted its first tokens came.
    `observed_s`: how long requests have waited there for a first token, `observed_from` by the least priority that
    counts; `lasting_s`: how long they have been decoded.
    `order`: its place among equal workers, of which each router has an order of its own.
    `rivals`: how many requests other routers send to decode workers for each of this router's.
    `token_pace`: how long tokens take lately over what models predict, on all decode workers.
    `lag_s`: how much later than models predict first tokens come lately, on all workers of its role.
    `terms`: what forecasts derive from all this; the registry drops it with each change.
    `adapters` are as its last heartbeat says, `digests` those of the weights of the loaded ones.
    `pool_model` and `pool_link` are those of another worker of its pool, for as long as it has none.

    Its load is what it reports, less what `ended` since, and `fresh`, which the report does not count yet. So several
    routers see one another's requests, and none twice. `beat_at`: when it last reported. `fresh_since`: from when on it
    can have computed what is left of the prompts in `fresh`, unless others came before them. `sizes`: those of booked
    prompts that are not computed. `turned_at`: when a prompt was computed, or came to an idle worker: a step began.
    """

    address: str
    role: Role
    state: WorkerState = WorkerState.UNKNOWN
    reason: str = "never heard from"
    unreadable: str = ""
    withheld: str = ""
    hello: WorkerHello | None = None
    beat: WorkerHeartbeat | None = None
    known_epoch: int | None = None
    has_served: bool = False
    last_seen: float | None = None
    forgiven_at: float | None = None
    silent_since: float = 0.0
    step_changed: float = 0.0
    idle_since: float | None = None
    num_dispatched: int = 0
    num_strikes: int = 0
    suspect_until: float = 0.0
    suspect: bool = False
    service_s: Ewma = field(default_factory=lambda: Ewma(SMOOTHING))
    lateness: Ewma = field(default_factory=lambda: Ewma(SMOOTHING, start=0.0))
    observed_s: float = 0.0
    observed_from: Mapping[int, float] = field(default_factory=dict)
    lasting_s: float = 0.0
    pool_model: StepModel = StepModel()
    pool_link: LinkModel = LinkModel()
    bookings: dict[int, Booking] = field(default_factory=dict)
    booked: Load = field(default_factory=Load)
    fresh: Load = field(default_factory=Load)
    ended: Load = field(default_factory=Load)
    beat_at: float = 0.0
    fresh_since: float = 0.0
    sizes: PromptSizes = field(default_factory=PromptSizes)
    turned_at: float = 0.0
    order: int = 0
    rivals: float = 0.0
    token_pace: float = 1.0
    lag_s: float = 0.0
    terms: object = None
    adapters: tuple[AdapterState, ...] = ()
    digests: frozenset[str] = frozenset()
    home: Role = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.role

    @property
    def ready(self) -> bool:
        return self.state is READY and not self.withheld

    @property
    def shown_state(self) -> str:
        """The state as metrics and /load name it."""
        return "withheld" if self.withheld and self.state is WorkerState.READY else str(self.state)

    @property
    def identity(self) -> WorkerHello:
        """The worker's hello. Raises RuntimeError for a worker without one, which is a bug in the caller."""
        if self.hello is None:
            raise RuntimeError(f"{self.address} has not said hello")
        return self.hello

    @property
    def epoch(self) -> int:
        return self.identity.epoch

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id if self.hello is not None else ""

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and answer, that the worker takes."""
        hello = self.hello or self.identity
        if hello.window and hello.block_size:
            return self.window.longest(hello.num_blocks, hello.max_model_len)
        most = hello.num_blocks * hello.block_size
        return most if most < hello.max_model_len else hello.max_model_len

    def num_blocks_of(self, num_tokens: int) -> int:
        """The most blocks that a sequence of so many tokens takes at once: all, or those of the model's window."""
        hello = self.identity
        if hello.window:
            step_tokens = hello.max_step_tokens if hello.role == "prefill" else 1
            return self.window.most_blocks(num_tokens, max(1, step_tokens))
        return -(-num_tokens // hello.block_size)

    @property
    def window(self) -> Window:
        """That of its model, in its blocks."""
        return Window(self.identity.window, max(1, self.identity.block_size))

    @property
    def slowness(self) -> float:
        """How many times later than predicted first tokens come there, at least 1.

        A geometric mean: prompts pass each other, so some come early and others late by the same factor, and an
        arithmetic one would take that for a slow worker.
        """
        return math.exp(late) if (late := self.lateness.value) > 0.0 else 1.0

    @property
    def num_reported_requests(self) -> int:
        """Requests that the last heartbeat counts."""
        beat = self.beat
        return beat.num_running + beat.num_waiting + beat.num_transferring if beat is not None else 0

    @property
    def num_requests(self) -> int:
        """Requests running, waiting or on their way."""
        beat, left = self.beat, -self.ended.num_requests
        if beat is not None:
            left += beat.num_running + beat.num_waiting + beat.num_transferring
        return (left if left > 0 else 0) + self.fresh.num_requests

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that must be computed before a new request's turn."""
        reported = self.beat.num_waiting_tokens if self.beat else 0
        return max(0, reported - self.ended.num_tokens) + self.fresh.num_tokens

    @property
    def num_available_blocks(self) -> int:
        """Blocks that a new request could get: free or evictable, less those booked since the last report."""
        hello, beat = self.hello, self.beat
        total = hello.num_blocks if hello is not None else 0
        reported = beat.num_free_blocks + beat.num_cached_blocks if beat is not None else total
        now_free = reported + self.ended.num_blocks - self.fresh.num_blocks
        left = total - self.booked.num_blocks
        least = now_free if now_free < left else left
        return least if least > 0 else 0

    @property
    def num_growing_blocks(self) -> int:
        """The most blocks that its sequences will take at once beyond those of now, by the lengths of answers.

        While their sum is small it stands for the peak, which is at most as large. Sequences of other routers are taken
        to grow like those of this one.
        """
        num_more = self.booked.num_more
        if not num_more:
            return 0
        if num_more > FEW_BLOCKS * (self.hello.num_blocks if self.hello else 0):
            num_more = peak_growth(self.bookings.values())
        return round(num_more * (1.0 + self.rivals))

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that a new request could still get when all sequences there have grown; less than 0: some will not."""
        return self.num_available_blocks - self.num_growing_blocks

    @property
    def step_model(self) -> StepModel:
        """What the worker says of its steps; nothing is known before its first ones."""
        return self.beat.step_model if self.beat else StepModel()

    @property
    def likely_model(self) -> StepModel:
        """The same; until something is known, what another worker of its pool said."""
        beat = self.beat
        return beat.step_model if beat is not None and beat.step_model.num_steps else self.pool_model

    @property
    def misfit(self) -> str:
        """Why it can never be used, whatever its heartbeats say; "" for one that fits."""
        hello = self.hello
        if hello is None:
            return "never said hello"
        if hello.home != self.home:
            return f"is a {hello.home} worker, not {self.home}"
        if hello.role not in ROLES:
            return f"has the role {hello.role}"
        return "" if hello.block_size else "has blocks of no tokens"

    def is_stuck(self, now: float) -> bool:
        """Whether its engine has not turned for longer than a turn may take."""
        beat = self.beat
        return beat is not None and beat.ready and now - self.step_changed > beat.turn_limit_s

    def is_fresh(self, booking: Booking) -> bool:
        """Whether the last report does not count the booking yet."""
        return self.beat is None or booking.serial > self.beat.serial

    @property
    def likely_link(self) -> LinkModel:
        """How KV reaches it as a rule, by its transfers; until it had some, by those of another worker of its pool."""
        link = self.beat.links.usual if self.beat is not None else self.pool_link
        return link if link.num_transfers else self.pool_link

    def silence(self, timeout_s: float) -> str:
        """Why it counts as dead: it is silent, or nothing that it says can be read."""
        silent = f"silent for more than {timeout_s:g} s"
        return f"{silent}, because its messages cannot be read: {self.unreadable}" if self.unreadable else silent

    def forgive(self, now: float, longest_s: float) -> bool:
        """Count the worker as heard just now, unless its silence has lasted longer than `longest_s`."""
        if self.last_seen != self.forgiven_at:
            self.silent_since = self.last_seen or 0.0
        if now - self.silent_since > longest_s and self.last_seen == self.forgiven_at:
            return False
        self.last_seen = self.forgiven_at = now
        return True

    def describe(self, now: float) -> str:
        """The worker in a few words, such as "tcp://10.0.0.7:7001 silent for more than 3 s, last heard 3.1 s ago"."""
        if self.state is WorkerState.READY:
            return f"{self.address} {self.withheld or 'ready'}"
        if self.state is WorkerState.DEAD and self.last_seen is not None:
            return f"{self.address} {self.reason}, last heard {now - self.last_seen:.1f} s ago"
        return f"{self.address} {self.reason}"


def order_of(router_id: str, address: str) -> int:
    """The worker's place among equal ones in the order of one router; 0 for a router without id."""
    if not router_id:
        return 0
    return int.from_bytes(blake2b(f"{router_id} {address}".encode(), digest_size=6).digest())


def by_fingerprint(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    """Workers by layout fingerprint: KV passes only between workers with the same one."""
    groups: dict[str, list[Worker]] = {}
    for worker in workers:
        groups.setdefault(worker.identity.fingerprint, []).append(worker)
    return groups
