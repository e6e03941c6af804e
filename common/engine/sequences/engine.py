"""Base class of both workers' engines: accepts, rejects, aborts and fails requests."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from common.blocks import BlockHasher
from common.engine.adapters import AdapterBank
from common.engine.kv import BlockCounts
from common.engine.kv.tiers import BlockRead, BlockTiers, ReadEnded
from common.engine.sequences.hidden_states import HiddenStateSlots
from common.engine.sequences.pending_grammars import MaskReady, PendingGrammars
from common.engine.sequences.reports import Reports
from common.engine.sequences.restores import BlockRestorer
from common.engine.sequences.scheduler import Scheduler
from common.engine.sequences.sequence import RequestRules, WorkerSequence
from common.engine.sequences.step_budget import Knob
from common.engine.transfer import PeerCaches
from common.engine.worker import (
    EngineConfig,
    EngineLoop,
    EngineStatus,
    RequestReceived,
    RouterLost,
    Send,
    StepRate,
    WorkerMetrics,
)
from common.errors import WireError, listed
from common.grammar import GrammarReady, Grammars
from common.latency import StepShape
from common.wire import Role
from common.wire.messages import AbortRequest, DecodeRequest, Message, PrefillRequest, ResetPrefixCache

log = logging.getLogger(__name__)
LOG_INTERVAL_S = 10.0
"""Minimum interval, in seconds, between log lines about one tuned parameter, which may change at every step."""
NOTABLE = 0.25
"""Minimum relative change of a value to be logged. A change of its reason is always logged."""

MAX_LISTED = 8
"""Maximum number of requests listed in one log line."""

R = TypeVar("R", PrefillRequest, DecodeRequest)
S = TypeVar("S", bound=WorkerSequence)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Optional parts of an engine. Without `grammars` or `adapters`, requests that use them are rejected.

    The engine closes `tiers` and `peers`. Without them, no blocks are read or pulled. `hidden`: slots for hidden
    states, for a model with a draft head.
    """

    grammars: Grammars | None = None
    tiers: BlockTiers | None = None
    adapters: AdapterBank | None = None
    peers: PeerCaches | None = None
    hidden: HiddenStateSlots | None = None


NO_PARTS = EngineParts()


class KnobLog:
    """Logs changes of self-tuned parameters and exports them as metrics. Used on the engine thread."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._known: dict[str, Knob] = {}
        self._logged: dict[str, tuple[Knob, float]] = {}

    def note(self, name: str, knob: Knob, now: float) -> None:
        """Record the value of parameter `name` at `now`, in monotonic seconds."""
        known = self._known.get(name)
        if knob == known:
            return
        self._known[name] = knob
        self._metrics.set_knob(name, knob.value, knob.reason, is_new_reason=not known or known.reason != knob.reason)
        if known is None:
            self._logged[name] = knob, -LOG_INTERVAL_S
            return
        before, logged_at = self._logged[name]
        is_notable = knob.reason != before.reason or abs(knob.value - before.value) >= NOTABLE * before.value
        if is_notable and now - logged_at >= LOG_INTERVAL_S:
            self._logged[name] = knob, now
            log.info(
                "%s changed from %d (%s) to %d (%s)", name, before.value, before.reason, knob.value, knob.reason,
                extra={"knob": name, "value": knob.value, "reason": knob.reason},
            )  # fmt: skip


class RequestEngine(EngineLoop, Generic[R, S]):
    """Engine of requests. Owns the block pool through its scheduler. `_in_step`: sequences of the current step.

    Subclasses set `role`, `_reports` and `_device_failure`, which is `ModelRunner.device_failure`.
    """

    role: ClassVar[Role]
    _reports: Reports
    _device_failure: Callable[[], str]

    def __init__(
        self,
        send: Send,
        config: EngineConfig,
        scheduler: Scheduler[S],
        rules: RequestRules,
        metrics: WorkerMetrics,
        parts: EngineParts,
    ) -> None:
        super().__init__(send)
        self._tiers, self._adapters, self._hidden = parts.tiers, parts.adapters, parts.hidden
        self._restores = BlockRestorer(parts.tiers, scheduler.block_size, metrics, parts.peers)
        self.scheduler: Scheduler[S] = scheduler
        self.metrics = metrics
        self._rules, self._max_waiting = rules, config.max_waiting
        self._grammars = PendingGrammars(parts.grammars, self.notify, scheduler.constrain, self._fail)
        self._rate, self._knob_log = StepRate(), KnobLog(metrics)
        self._in_step: Collection[S] = ()
        self._serials: Mapping[bytes, int] = {}  # replaced, never modified, because snapshots share it

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_empty(self) -> bool:
        return len(self.scheduler) == 0

    def apply(self, command: object) -> None:
        match command:
            case RequestReceived(router, AbortRequest(request_id=request_id, attempt=attempt)):
                sequence = self.scheduler.find(request_id)
                if sequence is not None and sequence.attempt <= attempt and sequence.router == router:
                    self._drop(sequence, "aborted")
            case RequestReceived(_, ResetPrefixCache()):
                self._reset_cache()
            case RequestReceived(router, message):
                self._refuse(router, message, f"a {self.role} worker does not accept {type(message).__name__}")
            case RouterLost(router):
                self._serials = {name: serial for name, serial in self._serials.items() if name != router}
                for sequence in self.scheduler:
                    if sequence.router == router:
                        self._drop(sequence, "router lost")
            case ReadEnded(read):
                self._end_reads([read])
            case GrammarReady(compiled):
                self._grammars.ready(compiled, self.scheduler)
            case MaskReady(sequence, constraint):
                if (waiting := self.scheduler.find(sequence.request_id)) is sequence:
                    self._grammars.on_mask(waiting, constraint)
            case _:
                raise TypeError(f"unknown command {command!r}")

    def device_failure(self) -> str:
        if not (problem := self._device_failure()):
            return ""
        ids = list(dict.fromkeys(sequence.request_id for sequence in self._in_step))
        return (
            f"{problem}. The step had requests {listed(ids, MAX_LISTED)}. {len(self.scheduler)} requests move to other "
            "workers. Check the GPU: nvidia-smi, and Xid in the kernel's log"
        )

    def fail_step(self, error: Exception) -> None:
        why = f"the step failed: {type(error).__name__}: {error}"
        for sequence in self._in_step:
            if self.scheduler.has(sequence):
                self._fail(sequence, self.role, why, retryable=True)
        self._in_step = ()

    def snapshot(self) -> EngineStatus:
        scheduler, model = self.scheduler, self.step_fit.model
        waiting = scheduler.waiting_shape
        num_adapters = len(self._adapters.held) if self._adapters is not None else 0
        running, here = (_users(each) if num_adapters else _users(()) for each in (scheduler.running, scheduler))
        waiting_s = model.steps_s(waiting, scheduler.max_step_tokens, self._decode_rows) if waiting.num_tokens else 0.0
        return EngineStatus(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_transferring=scheduler.num_in_transfer,
            num_waiting_tokens=waiting.num_tokens,
            blocks=scheduler.pool.counts,
            tokens_per_s=self._rate.tokens_per_s,
            step_time_s=self._rate.step_time_s,
            num_dropped_frames=self._num_dropped_frames,
            full_tokens_per_s=model.tokens_per_s(scheduler.most_step_tokens),
            waiting_s=waiting_s,
            num_context_tokens=scheduler.num_context_tokens,
            step_model=model,
            serials=self._serials,
            batch_cap=scheduler.batch_cap.value,
            step_tokens=scheduler.max_step_tokens,
            links=self._restores.links,
            tiers=self._tiers.counts if self._tiers is not None else (),
            num_adapters=num_adapters,
            adapters_running=running,
            adapters_waiting=here - running,
        )

    def _note_knobs(self, others: Mapping[str, Knob], now: float) -> None:
        """Record the scheduler's tuned parameters and `others`, after each step."""
        for name, knob in {**self.scheduler.knobs, **others}.items():
            self._knob_log.note(name, knob, now)

    @property
    def _decode_rows(self) -> StepShape:
        """Decode rows that each step computes in addition to prompts."""
        return StepShape()

    def check_integrity(self) -> BlockCounts:
        return self.scheduler.check_integrity()

    def _accept(self, router: bytes, request: R) -> None:
        """Accept or reject a request. Duplicates are ignored."""
        self._serials = {**self._serials, router: max(request.serial, self._serials.get(router, 0))}
        known = self.scheduler.find(request.request_id)
        if known is not None:
            if known.router != router:
                why = f"request id {request.request_id} is already in use by another router"
                self._report_failed(router, request.request_id, request.attempt, "queue", why, retryable=False)
                return
            if known.attempt >= request.attempt:
                return  # a duplicate: the first one keeps running
            if self._continue(known, request):
                return
            self._drop(known, "superseded by a new attempt")
        try:
            token_ids = self._rules.prompt(request)
        except WireError as error:
            self._refuse(router, request, str(error))
            return
        adapter = self._adapters.place(request.adapter) if self._adapters is not None else None
        if request.adapter and adapter is None:
            self._refuse(router, request, f"adapter {request.adapter} is not loaded on this worker", retryable=True)
            return
        if too_many := self._overload():
            self._refuse(router, request, too_many, retryable=True)
            return
        hasher = BlockHasher(self.scheduler.block_size, request.cache_salt, request.adapter)
        sequence = self._add(router, request, token_ids, hasher, time.monotonic())
        sequence.adapter = sequence.adapter if adapter is None else adapter
        self.scheduler.expect_hits(sequence, self._restores.num_held)
        self._restores.expect_pull(sequence)
        self._grammars.ask(sequence)

    def _continue(self, known: S, request: R) -> bool:
        """Continue a sequence as the new attempt `request`. Returns False if it must restart from its prompt."""
        return False

    @property
    def _has_unused_adapters(self) -> bool:
        """Whether there are retired adapters that no sequence uses."""
        if self._adapters is None or not (retired := self._adapters.retired):
            return False
        return not retired <= {sequence.request.adapter for sequence in self.scheduler}

    def _free_adapters(self) -> None:
        """Free unused adapters. No step may be in flight, because it may still read them."""
        if self._adapters is not None and self._has_unused_adapters:
            self._adapters.free({sequence.request.adapter for sequence in self.scheduler})

    @property
    @abstractmethod
    def _num_dropped_frames(self) -> int:
        """Number of KV frames dropped since the start."""

    @abstractmethod
    def _overload(self) -> str:
        """Return why the worker currently rejects requests, or ""."""

    @abstractmethod
    def _add(self, router: bytes, request: R, token_ids: list[int], hasher: BlockHasher, now: float) -> S:
        """Add a new sequence to the scheduler."""

    @abstractmethod
    def _phase_of(self, sequence: S) -> str:
        """Return the phase of a sequence, as in `RequestFailed`."""

    @abstractmethod
    def _drop(self, sequence: S, reason: str) -> None:
        """Drop a sequence without notifying its router."""

    def _reset_cache(self) -> None:
        """Drop all cached blocks of memory and tiers. Reads end first, because their blocks enter the cache."""
        while reads := [sequence.read for sequence in self.scheduler if sequence.read is not None]:
            self._end_reads(reads)  # with windows, the end of a complete read begins the next one
        self.scheduler.pool.reset_cache()
        self._restores.reset()

    def _end_reads(self, reads: Iterable[BlockRead]) -> None:
        """End these reads and continue their prompts, if still present, from the blocks read."""
        for read in reads:
            sequence = self.scheduler.find(read.request_id)
            if sequence is not None and sequence.read is read:
                self._restores.end(sequence, read)
                self.scheduler.restored(sequence, read.num_done)
                self._on_restored(sequence, read.num_done)
                if self.scheduler.window and read.num_done == len(read.blocks):
                    self._read_tiers(sequence, time.monotonic())  # its table has space for more blocks now

    def _read_tiers(self, sequence: S, now: float) -> None:
        """Start reading blocks of a sequence that was just admitted, or has received all blocks it had space for."""
        self._restores.begin(sequence, now, self.step_fit.model, self.scheduler.most_step_tokens)

    def _on_restored(self, sequence: S, num_blocks: int) -> None:
        """Hook: the sequence received `num_blocks` blocks from tiers or a peer."""

    def _expire_requests(self, now: float) -> None:
        """End overdue reads and fail requests whose deadline, or whose grammar's, has passed."""
        self._end_reads(self._restores.late(self.scheduler, now))
        for sequence in self.scheduler:
            if sequence.deadline < now:
                phase = self._phase_of(sequence)
                self._fail(sequence, phase, f"the request exceeded its deadline in phase {phase}", retryable=False)
            else:
                self._grammars.expire(sequence, now)
        if self._hidden is not None:
            self._hidden.retain(self._needs_hidden)

    def _needs_hidden(self, sequence: WorkerSequence) -> bool:
        """Return whether a later step may read the hidden states of the sequence's last tokens."""
        is_here = self.scheduler.find(sequence.request_id) is sequence
        return is_here and bool(sequence.blocks) and sequence.num_remaining > 0

    def _fail(self, sequence: S, phase: str, why: str, *, retryable: bool) -> None:
        self._drop(sequence, why)
        self._report_failed(sequence.router, sequence.request_id, sequence.attempt, phase, why, retryable=retryable)

    def _refuse(self, router: bytes, message: Message, why: str, *, retryable: bool = False) -> None:
        """Reject a message, if it refers to a request."""
        request_id, attempt = getattr(message, "request_id", ""), getattr(message, "attempt", 0)
        if request_id:
            self._report_failed(router, request_id, attempt, "queue", why, retryable=retryable)

    def _report_failed(
        self, router: bytes, request_id: str, attempt: int, phase: str, why: str, *, retryable: bool
    ) -> None:
        self._reports.fail(router, request_id, attempt, phase, why, retryable=retryable)
        self.metrics.count_failed(phase)


def _users(sequences: Iterable[WorkerSequence]) -> Counter[str]:
    """Count the sequences per adapter digest."""
    return Counter(sequence.request.adapter for sequence in sequences if sequence.adapter >= 0)
