"""Contract between the worker process and an engine. Implement these classes to serve with another engine.

    DutyOffer.begin ─> Duty.bind ─> DutyOffer.load ─> Duty.build_engine ─> Engine.start ─> commands ... ─> Engine.stop
                                        └─> ServedModel, which outlives role changes               ServedModel.close

The process owns sockets to routers, hellos, heartbeats, probes, role changes and shutdown. The engine owns the model,
its KV cache and its requests. Neither knows the other's internals. `LoopDuty`, `LoopModel` and `EngineLoop` are our
implementation.

Threads: all methods are called on the event loop and must return within milliseconds, except where a docstring says
otherwise. A blocked event loop sends no heartbeats, and routers declare the worker dead after seconds. The process may
exit without notice at any time, so processes that an engine starts must end with their parent.

Errors: `ConfigError` and `ModelError` before the worker is ready are refusals, logged in one sentence (exit status 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

import zmq

from common.config import WorkerConfig
from common.engine.kv import BlockCounts, BlockLog
from common.engine.kv.tiers import TierCounts
from common.latency import Links, StepModel
from common.model_files import ModelFiles
from common.wire import Curve, Role
from common.wire.messages import Message

if TYPE_CHECKING:
    from common.engine.worker.metrics import WorkerMetrics
    from common.engine.worker.vitals import WorkerIdentity

Send = Callable[[list[tuple[bytes, Message]]], None]
"""Sends (router, message) pairs to routers, in order. Thread-safe; never blocks."""


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """Command: a router sent a request, abort or order."""

    router: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class RouterLost:
    """Event: a router was lost. Its requests end without a message."""

    router: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Description of a loaded model, for hellos, logs and metrics.

    - `fingerprint`: equal on workers that exchange KV blocks. It covers model, weights, dtype and block layout.
    - `weights`: equal on workers that may continue each other's answers: model and weight format.
    - `layout`: names and values of settings in `fingerprint`. They explain to users why workers are not paired.
    - `block_size` in tokens, `block_bytes` in bytes on the wire. `num_blocks`: size of the KV cache.
    - `window`: maximum context of all layers in tokens; 0 if some layer has full attention.
    - `memory_bytes`: size of weights and KV cache; 0 if unknown.
    - `max_num_seqs` and `max_step_tokens`: limits of a step; 0 for the values of the role's settings.
    - `precision`, `kv_dtype` and `resources` ("8 threads") are words for the log and metrics.
    - `changes_role`: whether the model can be served in either role, by the duties of both offers.
    - `hands_over`: whether the engine can move running requests with their KV; see `Engine`.
    """

    model_id: str
    fingerprint: str
    weights: str
    max_model_len: int
    block_size: int
    num_blocks: int
    block_bytes: int
    precision: str
    kv_dtype: str
    resources: str = ""
    layout: tuple[tuple[str, str], ...] = ()
    window: int = 0
    memory_bytes: int = 0
    max_num_seqs: int = 0
    max_step_tokens: int = 0
    changes_role: bool = True
    hands_over: bool = True


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Snapshot of an engine for heartbeats, health and metrics. Replaced as a whole, never modified.

    Required, because routers place requests by them:

    - `num_running`, `num_waiting`, `num_transferring`: requests in the batch, queued, and with KV in transfer. Their
      sum is 0 only if the engine is empty.
    - `num_waiting_tokens`: prompt tokens accepted but not computed.
    - `blocks`: KV blocks by state. The total is constant.
    - `serials`: per router, the largest serial of its requests that the snapshot includes, rejected ones too. Routers
      add the requests after it to the counts themselves.
    - `at`: time of publication, in monotonic seconds. At most about a second old while requests run.

    Estimates, for predictions, admission, goals and scaling. The default means unknown, and routers use the pool's:

    - `step_model`: predicts step times, fitted to steps (`common.latency.StepFit`). `links`: fitted to KV transfers.
    - `waiting_s`: time to compute the queued prompts. `full_tokens_per_s`: rate of full steps. `tokens_per_s` and
      `step_time_s`: averages of recent steps. `num_context_tokens`: total context of the running requests.
    - `batch_cap` and `step_tokens`: current limits of running requests and of prompt tokens per step, if lower than in
      the hello.

    Only for metrics, 0 if the engine has no such part: `num_dropped_frames` (invalid or late KV frames), `tiers`,
    `num_adapters` (slots in use), `adapters_running` and `adapters_waiting` (requests by digest), `draft_blocks` and
    `draft_seconds` (compute time of a draft model). The process sets `num_refused_connections`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_transferring: int = 0
    num_waiting_tokens: int = 0
    blocks: BlockCounts = BlockCounts(0, 0, 0)
    tokens_per_s: float = 0.0
    step_time_s: float = 0.0
    num_dropped_frames: int = 0
    num_refused_connections: int = 0
    full_tokens_per_s: float = 0.0
    waiting_s: float = 0.0
    num_context_tokens: int = 0
    step_model: StepModel = StepModel()
    links: Links = Links()
    serials: Mapping[bytes, int] = field(default_factory=dict)
    batch_cap: int = 0
    step_tokens: int = 0
    tiers: Sequence[TierCounts] = ()
    num_adapters: int = 0
    adapters_running: Mapping[str, int] = field(default_factory=dict)
    adapters_waiting: Mapping[str, int] = field(default_factory=dict)
    draft_blocks: BlockCounts = BlockCounts(0, 0, 0)
    draft_seconds: float = 0.0
    at: float = 0.0

    @property
    def num_active(self) -> int:
        """Requests that would be interrupted if the worker stopped now."""
        return self.num_running + self.num_waiting + self.num_transferring

    def waiting_left_s(self, now: float) -> float:
        """Return the remainder of `waiting_s`, given the time since the snapshot."""
        return max(0.0, self.waiting_s - max(0.0, now - self.at))


class Engine(Protocol):
    """Serves the requests of one role. Properties are read at every heartbeat and probe, and must not block.

    For each `RequestReceived`, the engine sends messages (`common.wire.messages`) to the router that sent it:

    - A `PrefillRequest` or `DecodeRequest` gets `TokenOutput`s, the last one with a finish reason, or one
      `RequestFailed`. `retryable` means that another worker, or this one later, may serve it.
    - A request without a new token gets an empty `TokenDelta` about every second while it makes progress. Without one,
      its router considers it lost.
    - A repeated or lower attempt is ignored. A higher one replaces the request, and nothing more is sent for the
      previous one. A `request_id` of another router is refused, not retryable.
    - `AbortRequest` from the request's router ends its attempts up to the given one, without a message. So does
      `RouterLost` for all requests of a router, whose `serials` entry is removed.
    - `deadline_s` after its arrival, a request fails, not retryable. An error in a step fails the requests of the step,
      retryable. An engine that cannot continue sets `failure` and sends nothing: routers recover all of its requests.
    - `ResetPrefixCache` drops cached blocks. `HandOver` moves a running request with its KV. An engine that cannot do
      that drops the request and fails its `attempt`, retryable: the router continues it from the tokens that it has.
    - Any other message with a `request_id` is refused, not retryable. `SetAdapter`, `SetServing` and `ChangeRole` never
      arrive here.
    """

    @property
    def status(self) -> EngineStatus:
        """Latest snapshot. Includes each accepted request before its first message is sent."""

    @property
    def num_steps(self) -> int:
        """Count of iterations, which increases several times per second even without requests: proof of life."""

    @property
    def turn_limit_s(self) -> float:
        """Maximum duration of the current iteration, in seconds. Routers avoid a worker that exceeds it."""

    def is_stuck(self, now: float) -> bool:
        """Return whether the current iteration exceeds its limit. The worker then fails its liveness probe."""

    @property
    def alive(self) -> bool:
        """Whether the engine can compute. If False, the process exits with `failure`."""

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine."""

    @property
    def is_empty(self) -> bool:
        """Whether the engine has no requests or transfers in any state. Applied commands only."""

    @property
    def has_commands(self) -> bool:
        """Whether commands are queued that have not been applied."""

    def start(self) -> None:
        """Start the engine. Called once."""

    def submit(self, command: object) -> bool:
        """Queue a `RequestReceived`. Returns False if the queue is full, and the command is dropped."""

    def notify(self, event: object) -> None:
        """Queue a `RouterLost`, never dropped."""

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop after the current step, end all requests without messages, and release what `build_engine` created.

        Called on a thread; may block. Returns False if the engine still runs after `timeout_s`.
        """

    def check_integrity(self) -> BlockCounts:
        """Raise BlockError if a block's owner is not a live request. Called after `stop`, before a role change."""


@runtime_checkable
class Holdable(Protocol):
    """An engine that can suspend its steps."""

    def hold(self, is_held: bool) -> None:
        """Compute no further step until called with False. Requests stay, with their KV, deadlines and progress."""


class LoadedAdapter(Protocol):
    """A loaded LoRA adapter. Requests name it by `digest`, which is equal for equal contents on all workers."""

    @property
    def digest(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """Its memory."""


class AdapterStore(Protocol):
    """Adapters of an engine. Both methods are thread-safe."""

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Load the adapter in folder `path`. Called on a thread; may block. Raises ModelError."""

    def retire(self, digest: str) -> None:
        """Free an adapter once no request uses it. Loading it again before then keeps it."""


class ServedModel(Protocol):
    """A loaded model. It outlives its engines: a role change stops one and builds another."""

    @property
    def facts(self) -> ModelFacts: ...
    @property
    def adapters(self) -> AdapterStore | None:
        """Adapters; None if the engine supports none or has no slots for them."""

    @property
    def failure(self) -> str:
        """Why no further step can run because another process of the engine is lost; "" if it can."""

    @property
    def is_leaving(self) -> bool:
        """Whether another host of this worker wants to leave, so that the worker should drain and exit."""

    def register_metrics(self, metrics: WorkerMetrics) -> None:
        """Add the engine's own series to `metrics.registry`. Called once, after loading."""

    def close(self) -> None:
        """Release everything. Called on a thread at exit, after the last engine was stopped, or without an engine."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Resources that a role receives from its process. Each `identity` has its own epoch.

    `metrics`: counters and histograms, which the engine updates.
    """

    identity: WorkerIdentity
    context: zmq.Context[zmq.Socket[bytes]]
    curve: Curve | None
    metrics: WorkerMetrics


M = TypeVar("M", bound=ServedModel)
M_contra = TypeVar("M_contra", bound=ServedModel, contravariant=True)


class Duty(Protocol[M_contra]):
    """One run of a role. The process calls `bind`, then `build_engine`, or `close_kv` if no engine was built."""

    @property
    def role(self) -> Role: ...
    @property
    def config(self) -> WorkerConfig: ...
    @property
    def block_log(self) -> BlockLog:
        """Contents of the prefix cache, empty at first. The engine records changes, which the process sends to routers.

        Its methods are thread-safe.
        """

    @property
    def kv_address(self) -> str:
        """Addresses at which this role receives KV, separated by commas; "" for none.

        May be unknown until `build_engine` returns. The process replaces the host of a single address with
        `--advertise-host`; several addresses are sent unchanged.
        """

    @property
    def lend_address(self) -> str:
        """Address from which others copy cached blocks; "" if they cannot."""

    def bind(self) -> None:
        """Bind the sockets that need no model, so that a port in use is detected early.

        Raises zmq.ZMQError if a port is in use, ConfigError if a setting is impossible here.
        """

    def close_kv(self) -> None:
        """Close what `bind`, or a failed `build_engine`, has opened."""

    def build_engine(self, model: M_contra, send: Send) -> Engine:
        """Create the engine without starting it. It takes ownership of the sockets of `bind`.

        Raises any error, after which the process calls `close_kv`.
        """


@dataclass(frozen=True, slots=True)
class DutyOffer(Generic[M]):
    """A role that a process may have.

    `load` reads the model and allocates all memory, on a thread, for minutes if necessary. It cannot be interrupted: at
    SIGTERM the process calls `abandon`, which ends other processes that `load` has started, and exits. Raises
    ModelError or ConfigError. Only the first role's `load` is called; the engines of a second role use the same model.
    `begin` is called for each run of the role.

    Optional abilities, None if the engine does not have them:

    - `renew(model, files)` loads other weights of the same model next to those of `model`, on a thread, and returns a
      function that returns the model with them. The process calls the function when no engine uses the model, and then
      drops `model` without closing it. Both raise ModelError, after which `model` still works.
    - `free()` returns the memory of closed and dropped models to the system. With `renew`, it is also called while
      another model serves. `load` may then be called again, after the `begin` of the run that will use the model.
    """

    role: Role
    config: WorkerConfig
    load: Callable[[ModelFiles], M]
    begin: Callable[[WorkerParts], Duty[M]]
    abandon: Callable[[], None] = lambda: None
    renew: Callable[[M, ModelFiles], Callable[[], M]] | None = None
    free: Callable[[], None] | None = None
