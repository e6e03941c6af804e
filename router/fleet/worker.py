"""State of one worker as known to the router: identity, last report and bookings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from common.blocks import Window
from common.errors import backoff_s
from common.latency import LinkModel, StepModel
from common.observe import Ewma
from common.wire import ROLES, Role
from common.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AdapterState,
    WorkerHeartbeat,
    WorkerHello,
    common_version,
    version_names,
)
from router.fleet.booking import Bookings, peak_growth

SMOOTHING = 0.1
"""Smoothing factor of a worker's averages."""
MAX_CONSECUTIVE_FAILURES = 3
"""Consecutive failed requests after which a worker is a suspect."""
SUSPECT_S, MAX_SUSPECT_S = 5.0, 60.0
"""Time without requests for a suspect, which doubles with each failure up to the second value, in seconds."""
FEW_BLOCKS = 0.1
"""Fraction of a worker's blocks. Smaller growth is not computed exactly."""


class WorkerState(StrEnum):
    """unknown ─ hello ─> connected ─ heartbeat ─> ready <─> draining; dead while silent or stuck."""

    UNKNOWN = "unknown"
    CONNECTED = "connected"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


READY = WorkerState.READY  # an enum member lookup would double the cost of `Worker.ready`


@dataclass(slots=True)
class Liveness:
    """Liveness of a worker, and requests that failed on it.

    `known_epoch` is that of its last hello. `has_served`: it has been ready in this incarnation. `unreadable`: why its
    last frame was dropped, "" after a valid heartbeat. `forgiven_at`: value of `last_seen` set when its silence was
    last tolerated; the silence began at `silent_since`. `idle_since`: time since which it has had no request, None if
    it has some.

    `suspect`: several consecutive requests failed. A worker that fails fast looks idle and would attract all traffic.
    """

    known_epoch: int | None = None
    has_served: bool = False
    unreadable: str = ""
    last_seen: float | None = None
    forgiven_at: float | None = None
    silent_since: float = 0.0
    step_changed: float = 0.0
    idle_since: float | None = None
    num_consecutive_failures: int = 0
    suspect: bool = False
    suspect_until: float = 0.0

    def begin(self) -> None:
        """Start a new incarnation without the failures of the last one."""
        self.num_consecutive_failures, self.suspect, self.has_served = 0, False, False

    def silence(self, timeout_s: float) -> str:
        """Return why a silent worker counts as dead."""
        silent = f"silent for more than {timeout_s:g} s"
        return f"{silent}, because its messages are invalid: {self.unreadable}" if self.unreadable else silent

    def forgive(self, now: float, longest_s: float) -> bool:
        """Tolerate silence: treat the worker as seen now. Returns False if it has lasted longer than `longest_s`."""
        if self.last_seen != self.forgiven_at:
            self.silent_since = self.last_seen or 0.0
        if now - self.silent_since > longest_s and self.last_seen == self.forgiven_at:
            return False
        self.last_seen = self.forgiven_at = now
        return True

    def failed(self, now: float) -> bool:
        """Record a failed request. Returns True if the worker becomes a suspect, for longer each time."""
        self.num_consecutive_failures += 1
        if self.num_consecutive_failures < MAX_CONSECUTIVE_FAILURES:
            return False
        self.suspect = True
        num_more = self.num_consecutive_failures - MAX_CONSECUTIVE_FAILURES
        self.suspect_until = now + backoff_s(SUSPECT_S, MAX_SUSPECT_S, num_more)
        return True

    def served(self) -> bool:
        """Record tokens from the worker. Returns True if it was a suspect."""
        was_suspect = self.suspect
        self.num_consecutive_failures, self.suspect = 0, False
        return was_suspect


@dataclass(slots=True)
class Estimates:
    """Averages and observations that correct the forecasts for a worker.

    - `service_s`: average decode time of a request; 0 before the first.
    - `lateness`: average logarithm of measured over predicted time of first tokens.
    - `observed_s`: how long requests have waited for a first token; `observed_from` the same by minimum priority.
    - `lasting_s`: how long running requests have been decoded.
    - `other_routers`: requests of other routers per request of this router, on all decode workers.
    - `token_pace`: measured over predicted time per token, on all decode workers.
    - `lag_s`: excess of the time of first tokens over the prediction, on all workers of its role.
    """

    service_s: Ewma = field(default_factory=lambda: Ewma(SMOOTHING))
    lateness: Ewma = field(default_factory=lambda: Ewma(SMOOTHING, start=0.0))
    observed_s: float = 0.0
    observed_from: Mapping[int, float] = field(default_factory=dict)
    lasting_s: float = 0.0
    other_routers: float = 0.0
    token_pace: float = 1.0
    lag_s: float = 0.0

    def observe(self, wait_s: float, lasting_s: float, wait_from: Mapping[int, float]) -> None:
        """Update the observed waits and decode times."""
        self.observed_s, self.lasting_s, self.observed_from = wait_s, lasting_s, wait_from

    @property
    def slowness(self) -> float:
        """Ratio of measured to predicted time of first tokens, at least 1.

        The mean is geometric: prompts pass each other, so some are early and others late by the same factor. An
        arithmetic mean would take that for a slow worker.
        """
        return math.exp(late) if (late := self.lateness.value) > 0.0 else 1.0


@dataclass(slots=True)
class CurrentLoad:
    """Current load of a worker: its report, minus work that has `ended` since, plus `fresh` work not reported yet.

    This way routers see each other's requests, and count none twice.

    `num_blocks` is the total, 0 before its hello. `beat_at` is the time of the last report `beat`. `adapters` are those
    of that report, `digests` those of the loaded ones. `pool_model` and `pool_link` come from another worker of its
    role, and are used until the worker has its own.
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
        """Process a report."""
        self.beat, self.beat_at = beat, now
        if self.adapters != beat.adapters:
            self.adapters = beat.adapters
            self.digests = frozenset(one.digest for one in beat.adapters if one.status == "loaded")
        self.bookings.reported(beat.serial, now)

    @property
    def num_reported_requests(self) -> int:
        """Number of requests in the last report."""
        beat = self.beat
        return beat.num_running + beat.num_waiting + beat.num_transferring if beat is not None else 0

    @property
    def num_requests(self) -> int:
        """Number of requests that are running, queued or in transit."""
        beat, left = self.beat, -self.bookings.ended.num_requests
        if beat is not None:
            left += beat.num_running + beat.num_waiting + beat.num_transferring
        return (left if left > 0 else 0) + self.bookings.fresh.num_requests

    @property
    def num_queued_tokens(self) -> int:
        """Number of prompt tokens to compute before a new request."""
        reported = self.beat.num_waiting_tokens if self.beat else 0
        return max(0, reported - self.bookings.ended.num_tokens) + self.bookings.fresh.num_tokens

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks for new requests: free or evictable, minus those booked since the last report."""
        beat, total = self.beat, self.num_blocks
        reported = beat.num_free_blocks + beat.num_cached_blocks if beat is not None else total
        now_free = reported + self.bookings.ended.num_blocks - self.bookings.fresh.num_blocks
        left = total - self.bookings.total.num_blocks
        least = now_free if now_free < left else left
        return least if least > 0 else 0

    @property
    def num_growing_blocks(self) -> int:
        """Predicted peak of additional blocks that the running sequences will use, from the lengths of answers.

        While the sum is small it replaces the peak, which is at most as large. Sequences of other routers are assumed
        to grow like this router's.
        """
        num_more = self.bookings.total.num_more
        if not num_more:
            return 0
        if num_more > FEW_BLOCKS * self.num_blocks:
            num_more = peak_growth(self.bookings.by_serial.values())
        return round(num_more * (1.0 + self.estimates.other_routers))

    @property
    def num_spare_blocks(self) -> int:
        """Number of blocks for new requests after all sequences have grown. Negative if not all can grow."""
        return self.num_available_blocks - self.num_growing_blocks

    @property
    def step_model(self) -> StepModel:
        """The worker's step model; unknown before its first steps."""
        return self.beat.step_model if self.beat else StepModel()

    @property
    def likely_model(self) -> StepModel:
        """The worker's step model, or that of another worker of its role until it has one."""
        beat = self.beat
        return beat.step_model if beat is not None and beat.step_model.num_steps else self.pool_model

    @property
    def likely_link(self) -> LinkModel:
        """The worker's usual link model, or that of another worker of its role until it has one."""
        link = self.beat.links.usual if self.beat is not None else self.pool_link
        return link if link.num_transfers else self.pool_link


@dataclass(slots=True, eq=False)
class Worker:
    """State of one address. Modified only by `WorkerRegistry`.

    `role` is its current role from the hello. `home` is the role under which it was configured or discovered, with
    which its process starts. `hello` is set by `introduce`. `order` is its rank among equally good workers, which
    differs between routers. `withheld` is the reason why it gets no new requests, "" if it may get some. `outdated`:
    its weights differ from those of the newest order, and it gets no requests until it has exchanged them.

    `forecast_inputs` caches values derived for forecasts. The registry clears it at each change.
    """

    address: str
    role: Role
    state: WorkerState = WorkerState.UNKNOWN
    reason: str = "no hello received yet"
    withheld: str = ""
    outdated: bool = False
    order: int = 0
    hello: WorkerHello | None = None
    known_id: str = ""
    life: Liveness = field(default_factory=Liveness)
    bookings: Bookings = field(default_factory=Bookings)
    estimates: Estimates = field(default_factory=Estimates)
    load: CurrentLoad = field(init=False)
    forecast_inputs: object = None
    home: Role = field(init=False)

    def __post_init__(self) -> None:
        self.home, self.load = self.role, CurrentLoad(self.bookings, self.estimates)
        self.introduce(self.hello)

    def introduce(self, hello: WorkerHello | None) -> None:
        """Set its identity; None when its incarnation has ended. `worker_id` is kept."""
        self.hello, self.load.num_blocks = hello, hello.num_blocks if hello is not None else 0
        if hello is not None:
            self.known_id = hello.worker_id

    @property
    def ready(self) -> bool:
        return self.state is READY and not self.withheld and not self.outdated

    @property
    def shown_state(self) -> str:
        """The state as reported by metrics and /load."""
        return "withheld" if self.state is WorkerState.READY and not self.ready else str(self.state)

    @property
    def identity(self) -> WorkerHello:
        """The worker's hello. Raises RuntimeError if there is none, which is a bug in the caller."""
        if self.hello is None:
            raise RuntimeError(f"{self.name} has not said hello")
        return self.hello

    @property
    def epoch(self) -> int:
        return self.identity.epoch

    @property
    def worker_id(self) -> str:
        """Its id, as of the last hello; "" before the first one."""
        return self.known_id

    @property
    def name(self) -> str:
        """See `worker_name`."""
        return worker_name(self.known_id, self.address)

    @property
    def max_tokens(self) -> int:
        """Maximum sequence length, prompt and answer."""
        hello = self.hello or self.identity
        if hello.window and hello.block_size:
            return self.window.longest(hello.num_blocks, hello.max_model_len)
        most = hello.num_blocks * hello.block_size
        return most if most < hello.max_model_len else hello.max_model_len

    def num_blocks_of(self, num_tokens: int) -> int:
        """Return the peak number of blocks of a sequence: all of its blocks, or those within the model's window."""
        hello = self.identity
        if hello.window:
            step_tokens = hello.max_step_tokens if hello.role == "prefill" else 1
            return self.window.most_blocks(num_tokens, max(1, step_tokens))
        return -(-num_tokens // hello.block_size)

    @property
    def window(self) -> Window:
        """The model's window in this worker's blocks."""
        return Window(self.identity.window, max(1, self.identity.block_size))

    @property
    def speaks_our_protocol(self) -> bool:
        """Whether this router and the worker, which has said hello, speak a common protocol version."""
        return common_version(self.identity.oldest_protocol, self.identity.protocol) > 0

    @property
    def incompatibility(self) -> str:
        """Reason why the worker can never be used; "" if it can."""
        hello = self.hello
        if hello is None:
            return "no hello received yet"
        if not self.speaks_our_protocol:
            theirs = version_names(hello.oldest_protocol, hello.protocol)
            ours = version_names(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)
            return f"protocol: it speaks {theirs}, this router {ours}"
        if hello.home != self.home:
            return f"it is a {hello.home} worker, but is configured as a {self.home} worker"
        if hello.role not in ROLES:
            return f"unknown role {hello.role!r}"
        return "" if hello.block_size else "invalid block size 0"

    def is_stuck(self, now: float) -> bool:
        """Return whether the engine has completed no step within the limit that it reported."""
        beat = self.load.beat
        return beat is not None and beat.ready and now - self.life.step_changed > beat.turn_limit_s

    def describe(self, now: float) -> str:
        """Describe the worker in one line: "worker decode-0: silent for more than 3 s, last message 3.1 s ago"."""
        return f"{self.name}: {self.condition(now)}"

    def condition(self, now: float) -> str:
        """Describe the worker's state without its name."""
        if self.state is WorkerState.READY:
            return self.withheld or ("changing its weights" if self.outdated else "ready")
        if self.state is WorkerState.DEAD and self.life.last_seen is not None:
            return f"{self.reason}, last message {now - self.life.last_seen:.1f} s ago"
        return self.reason


def worker_name(worker_id: str, address: str) -> str:
    """Return the name for logs and errors: "worker decode-0", or "worker at ADDRESS" while the id is unknown."""
    return f"worker {worker_id}" if worker_id else f"worker at {address}"


def order_of(router_id: str, address: str) -> int:
    """Return the worker's rank among equally good ones for one router; 0 for a router without an id."""
    if not router_id:
        return 0
    return int.from_bytes(blake2b(f"{router_id} {address}".encode(), digest_size=6).digest())


def by_fingerprint(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    """Group workers by layout fingerprint. KV can only be transferred within a group."""
    groups: dict[str, list[Worker]] = {}
    for worker in workers:
        groups.setdefault(worker.identity.fingerprint, []).append(worker)
    return groups
