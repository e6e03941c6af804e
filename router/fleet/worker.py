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
from router.fleet.booking import Bookings, peak_growth

SMOOTHING = 0.1
"""The share of one more request in a worker's averages."""
MAX_STRIKES = 3
"""A worker that failed so many requests in a row is a suspect, the longer the more often."""
SUSPECT_S, MAX_SUSPECT_S = 5.0, 60.0
"""How long a worker that failed too often gets no requests: twice as long each time, up to the second number."""
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
class Life:
    """Signs of life of a worker, and requests that it failed.

    `known_epoch` is that of its last hello. `has_served`: it has been ready in its present life. `unreadable`: why its
    last frame was dropped; "" once it has sent a heartbeat that could be read. `forgiven_at`: what `last_seen` was set
    to when its silence was last forgiven; it has lasted since `silent_since`. `idle_since`: since when it has had no
    request; None while it has some.

    `suspect`: it failed several requests in a row. A worker that fails fast looks idle and would draw all traffic.
    """

    known_epoch: int | None = None
    has_served: bool = False
    unreadable: str = ""
    last_seen: float | None = None
    forgiven_at: float | None = None
    silent_since: float = 0.0
    step_changed: float = 0.0
    idle_since: float | None = None
    num_strikes: int = 0
    suspect: bool = False
    suspect_until: float = 0.0

    def begin(self) -> None:
        """A new life begins, without the failures of the one before."""
        self.num_strikes, self.suspect, self.has_served = 0, False, False

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

    def failed(self, now: float) -> bool:
        """It failed a request. True if that makes it a suspect, for longer each time."""
        self.num_strikes += 1
        if self.num_strikes < MAX_STRIKES:
            return False
        self.suspect = True
        self.suspect_until = now + min(MAX_SUSPECT_S, SUSPECT_S * 2.0 ** (self.num_strikes - MAX_STRIKES))
        return True

    def served(self) -> bool:
        """Tokens came from it. True if it was a suspect."""
        was_suspect = self.suspect
        self.num_strikes, self.suspect = 0, False
        return was_suspect


@dataclass(slots=True)
class Estimates:
    """Averages and observations that correct forecasts for a worker.

    `service_s`: the recent average of how long it decodes a request; 0 before the first.
    `lateness`: the recent average of the logarithm of how many times later than predicted its first tokens came.
    `observed_s`: how long requests have waited there for a first token, `observed_from` by the least priority that
    counts; `lasting_s`: how long they have been decoded.
    `rivals`: how many requests other routers send to decode workers for each of this router's.
    `token_pace`: how long tokens take lately over what models predict, on all decode workers.
    `lag_s`: how much later than models predict first tokens come lately, on all workers of its role.
    """

    service_s: Ewma = field(default_factory=lambda: Ewma(SMOOTHING))
    lateness: Ewma = field(default_factory=lambda: Ewma(SMOOTHING, start=0.0))
    observed_s: float = 0.0
    observed_from: Mapping[int, float] = field(default_factory=dict)
    lasting_s: float = 0.0
    rivals: float = 0.0
    token_pace: float = 1.0
    lag_s: float = 0.0

    def observe(self, wait_s: float, lasting_s: float, wait_from: Mapping[int, float]) -> None:
        """Requests have waited there so long for first tokens, or have been decoded for so long."""
        self.observed_s, self.lasting_s, self.observed_from = wait_s, lasting_s, wait_from

    @property
    def slowness(self) -> float:
        """How many times later than predicted first tokens come there, at least 1.

        A geometric mean: prompts pass each other, so some come early and others late by the same factor, and an
        arithmetic one would take that for a slow worker.
        """
        return math.exp(late) if (late := self.lateness.value) > 0.0 else 1.0


@dataclass(slots=True)
class CurrentLoad:
    """What a worker has to do: what it reports, less what `ended` since, and `fresh` work, which the report does not
    count yet. So several routers see one another's requests, and none twice.

    `num_blocks` are all that it has, 0 before its hello. `beat_at`: when it last reported `beat`. `adapters` are those
    of that heartbeat, `digests` those of the weights of the loaded ones. `pool_model` and `pool_link` are those of
    another worker of its pool, for as long as it has none.
    """

    bookings: Bookings
    estimates: Estimates
    num_blocks: int = 0
    beat: WorkerHeartbeat | None = None
    beat_at: float = 0.0
    adapters: tuple[AdapterState, ...] = ()
    digests: frozenset[str] = frozenset()
    pool_model: StepModel = StepModel()
    pool_link: LinkModel = LinkModel()

    def report(self, beat: WorkerHeartbeat, now: float) -> None:
        """The worker reports."""
        self.beat, self.beat_at = beat, now
        if self.adapters != beat.adapters:
            self.adapters = beat.adapters
            self.digests = frozenset(one.digest for one in beat.adapters if one.status == "loaded")
        self.bookings.reported(beat.serial, now)

    @property
    def num_reported_requests(self) -> int:
        """Requests that the last heartbeat counts."""
        beat = self.beat
        return beat.num_running + beat.num_waiting + beat.num_transferring if beat is not None else 0

    @property
    def num_requests(self) -> int:
        """Requests running, waiting or on their way."""
        beat, left = self.beat, -self.bookings.ended.num_requests
        if beat is not None:
            left += beat.num_running + beat.num_waiting + beat.num_transferring
        return (left if left > 0 else 0) + self.bookings.fresh.num_requests

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that must be computed before a new request's turn."""
        reported = self.beat.num_waiting_tokens if self.beat else 0
        return max(0, reported - self.bookings.ended.num_tokens) + self.bookings.fresh.num_tokens

    @property
    def num_available_blocks(self) -> int:
        """Blocks that a new request could get: free or evictable, less those booked since the last report."""
        beat, total = self.beat, self.num_blocks
        reported = beat.num_free_blocks + beat.num_cached_blocks if beat is not None else total
        now_free = reported + self.bookings.ended.num_blocks - self.bookings.fresh.num_blocks
        left = total - self.bookings.total.num_blocks
        least = now_free if now_free < left else left
        return least if least > 0 else 0

    @property
    def num_growing_blocks(self) -> int:
        """The most blocks that its sequences will take at once beyond those of now, by the lengths of answers.

        While their sum is small it stands for the peak, which is at most as large. Sequences of other routers are taken
        to grow like those of this one.
        """
        num_more = self.bookings.total.num_more
        if not num_more:
            return 0
        if num_more > FEW_BLOCKS * self.num_blocks:
            num_more = peak_growth(self.bookings.by_serial.values())
        return round(num_more * (1.0 + self.estimates.rivals))

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
    def likely_link(self) -> LinkModel:
        """How KV reaches it as a rule, by its transfers; until it had some, by those of another worker of its pool."""
        link = self.beat.links.usual if self.beat is not None else self.pool_link
        return link if link.num_transfers else self.pool_link


@dataclass(slots=True, eq=False)
class Worker:
    """State of one address. Only `WorkerRegistry` changes it.

    `role` is the present one, as its hello says; `home` the one under which it was configured or found, with which its
    process starts. `hello` is its identity: see `introduce`. `order`: its place among equal workers, of which each
    router has its own order. `withheld`: why discovery lets it have no new work; "" while it may have some.

    `terms`: what forecasts derive from all parts; the registry drops it with each change.
    """

    address: str
    role: Role
    state: WorkerState = WorkerState.UNKNOWN
    reason: str = "never heard from"
    withheld: str = ""
    order: int = 0
    hello: WorkerHello | None = None
    life: Life = field(default_factory=Life)
    bookings: Bookings = field(default_factory=Bookings)
    estimates: Estimates = field(default_factory=Estimates)
    load: CurrentLoad = field(init=False)
    terms: object = None
    home: Role = field(init=False)

    def __post_init__(self) -> None:
        self.home, self.load = self.role, CurrentLoad(self.bookings, self.estimates)
        self.introduce(self.hello)

    def introduce(self, hello: WorkerHello | None) -> None:
        """Set its identity; None once its life has ended."""
        self.hello, self.load.num_blocks = hello, hello.num_blocks if hello is not None else 0

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
        beat = self.load.beat
        return beat is not None and beat.ready and now - self.life.step_changed > beat.turn_limit_s

    def describe(self, now: float) -> str:
        """The worker in a few words, such as "tcp://10.0.0.7:7001 silent for more than 3 s, last heard 3.1 s ago"."""
        if self.state is WorkerState.READY:
            return f"{self.address} {self.withheld or 'ready'}"
        if self.state is WorkerState.DEAD and self.life.last_seen is not None:
            return f"{self.address} {self.reason}, last heard {now - self.life.last_seen:.1f} s ago"
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
