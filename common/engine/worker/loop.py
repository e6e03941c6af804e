"""Engine loop of both workers: one thread owns the scheduler, blocks and model, and processes commands.

event loop ─ submit(command) ─> inbox ─> engine thread: apply commands, step, publish status ─> outbox ─> event loop
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from common.engine.kv import BlockCounts
from common.engine.worker.contract import EngineStatus, Send
from common.engine.worker.step_times import StepTimes
from common.errors import BlockError, DeviceLost, RankLost
from common.latency import StepFit, StepShape
from common.machine import CoreShare
from common.wire.messages import Message

log = logging.getLogger(__name__)
IDLE_WAIT_S = 0.05
"""Time, in seconds, that an idle loop waits for a command."""
IDLE_CHECK_S = 0.5
"""Idle time, in seconds, before the worker checks its blocks. An immediate check would use the core on which the other
pool computes the next token of the same request."""
INBOX_BOUND = 65_536
"""Maximum number of queued commands: more than routers send a worker during a step."""
PROGRESS_INTERVAL_S = 1.0
"""Interval, in seconds, of progress reports for requests without a new token."""
MAX_FAILED_STEPS = 8
"""Consecutive failed steps after which the engine stops and the worker becomes unhealthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`identity`: the worker's ID and boot epoch. `max_model_len`: the model's limit; the cache may be smaller.

    `max_waiting`: maximum number of queued requests, in addition to running ones.
    """

    identity: tuple[str, int]
    eos_token_ids: Collection[int]
    max_model_len: int
    max_waiting: int


class EngineLoop(ABC):
    """Our `Engine`. Subclasses define how commands are applied, what a step computes, and what expires."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._outbox: list[tuple[bytes, Message]] = []
        self._stopping = False
        self._failed_steps = 0
        self._has_stepped = False
        self._progress_told_at = time.monotonic()
        self._busy = self._is_held = False
        self._worked_at = 0.0
        self.num_steps = 0
        self.step_times = StepTimes()
        self.step_fit = StepFit()
        self._watch = (time.monotonic(), self.step_times.idle_limit_s)
        self.status = EngineStatus()
        self.failure: BaseException | None = None
        self._cores = CoreShare("", 0)
        self._set_threads: Callable[[int], None] | None = None
        self._num_threads = 0
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def share_cores(self, cores: CoreShare, set_threads: Callable[[int], None]) -> None:
        """Let `cores` decide how many threads each step uses. Must precede `start`.

        `set_threads` is called when the number changes.
        """
        self._cores, self._set_threads = cores, set_threads

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop the loop after the current step. Returns False if that took longer than `timeout_s`."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, command: object) -> bool:
        """Queue a command; False if the inbox is full. Thread-safe."""
        if self._inbox.qsize() >= INBOX_BOUND:
            return False
        self._inbox.put(command)
        return True

    def notify(self, event: object) -> None:
        """Queue an event of the engine's own threads. Not bounded: the number of requests limits these events."""
        self._inbox.put(event)

    def hold(self, is_held: bool) -> None:
        """See `Holdable`. Thread-safe."""
        self._is_held = is_held
        self._inbox.put(None)

    @property
    def has_commands(self) -> bool:
        """Whether commands are queued. Thread-safe."""
        return not self._inbox.empty()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    @property
    def turn_limit_s(self) -> float:
        """Maximum duration of the current iteration before it counts as stuck."""
        return self._watch[1]

    def is_stuck(self, now: float) -> bool:
        """Return whether the current iteration exceeds its limit. Thread-safe."""
        began, limit_s = self._watch
        return now - began > limit_s

    def emit(self, router: bytes, message: Message) -> None:
        """Queue a message for a router. Messages of an iteration are sent together."""
        self._outbox.append((router, message))

    def planned(self, shape: StepShape) -> None:
        """Set the time limit. `step` calls this before it computes, or waits for, a step of this shape."""
        self._watch = (time.monotonic(), self.step_times.limit_s(shape, self.step_fit.model))

    def took(self, shape: StepShape, step_s: float) -> None:
        """Record a completed step of this shape. Called by `step`.

        `step_s`: seconds since its start, or since the end of the previous step if it was launched earlier.
        """
        self.step_fit.observe(shape, step_s)
        self.step_times.add(shape, step_s, self.step_fit.model)

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` would compute something."""

    @property
    def is_light(self) -> bool:
        """Whether the next step is memory-bound, so that one core less hardly slows it down."""
        return False

    @property
    def is_prefill(self) -> bool:
        """Whether the next step computes only prompts. Decode workers on the same cores leave cores to it."""
        return False

    def hold_s(self, now: float) -> float:
        """Return how long to delay the next step, to favour others on the same cores or to batch requests."""
        return 0.0

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there are no requests in any state."""

    @abstractmethod
    def apply(self, command: object) -> None:
        """Apply one command or event."""

    @abstractmethod
    def step(self, now: float) -> None:
        """Schedule and compute one step."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """End requests that have exceeded their deadline."""

    @abstractmethod
    def report_progress(self, *, has_stepped: bool) -> None:
        """Emit an output without tokens for each request that makes progress but has no new token.

        Requests waiting to be computed make progress only if `has_stepped`: a step has ended since the last call.
        """

    @abstractmethod
    def snapshot(self) -> EngineStatus:
        """Return the status to publish."""

    @abstractmethod
    def check_integrity(self) -> BlockCounts:
        """Raise BlockError if a block's owner is not a live request."""

    @abstractmethod
    def device_failure(self) -> str:
        """Return why no further step can run after one that raised: the GPU has failed. "" if it works."""

    @abstractmethod
    def fail_step(self, error: Exception) -> None:
        """Fail the requests of a step that raised."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the engine thread, on that thread."""

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.exception("engine died: %s", error)
            self.failure = error
        finally:
            self._cores.close()
            self.close()

    def _turn(self) -> None:
        self._watch = (time.monotonic(), self.step_times.idle_limit_s)
        self._take_commands()
        now = time.monotonic()
        self.expire(now)
        if self._is_held:
            self._hold(IDLE_WAIT_S)
            self._has_stepped = True  # all requests keep their places, so they count as making progress
        elif self.has_work:
            if (held_s := self._step_if_due(now)) > 0.0:
                self._hold(held_s)
        elif self._busy and self.is_empty and now - self._worked_at >= IDLE_CHECK_S:
            self._busy = False
            self.check_integrity()
        if not self.has_work:
            self._cores.end()  # before waiting for commands: the other pool may be about to start
        self.num_steps += 1
        self._report_progress(now)
        self._publish()
        self._flush()

    def _step_if_due(self, now: float) -> float:
        """Compute a step, or return the seconds for which to wait with it. Either may complete the step before."""
        try:
            if (held_s := self.hold_s(now)) > 0.0:
                return held_s
            self._busy, self._worked_at = True, now
            self._take_cores()
            self.step(now)
            self._failed_steps, self._has_stepped = 0, True
        except (BlockError, RankLost):
            raise  # block ownership is inconsistent, so requests could get mixed up; or no further step can run
        except Exception as error:
            # Not `fail_step`: routers must count this as the worker's death, which its requests may have caused.
            if problem := self.device_failure():
                raise DeviceLost(problem) from error
            self._failed_steps += 1
            log.exception("engine: step failed (%d consecutive failures)", self._failed_steps)
            self.fail_step(error)
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
        return 0.0

    def _hold(self, held_s: float) -> None:
        """Delay computation for `held_s` seconds or until a command arrives."""
        self._cores.end()
        self._publish()
        self._flush()
        with contextlib.suppress(Empty):
            self._carry_out([self._inbox.get(timeout=min(IDLE_WAIT_S, held_s))])

    def _report_progress(self, now: float) -> None:
        if now - self._progress_told_at >= PROGRESS_INTERVAL_S:
            self.report_progress(has_stepped=self._has_stepped)
            self._has_stepped, self._progress_told_at = False, now

    def _publish(self) -> None:
        self.status = replace(self.snapshot(), at=time.monotonic())

    def _take_cores(self) -> None:
        if self._set_threads is None:
            return
        num_threads = self._cores.begin(prompts=self.is_prefill)
        if self.is_light:  # leave a core to processes that forward tokens: one preempted thread delays all others
            num_threads = max(1, num_threads - 1)
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            self._set_threads(num_threads)

    def _take_commands(self) -> None:
        """Apply the queued commands. Later ones wait, so that a flood of commands cannot starve steps."""
        try:
            command = self._inbox.get_nowait() if self.has_work else self._inbox.get(timeout=IDLE_WAIT_S)
        except Empty:
            return
        self._carry_out([command, *(self._inbox.get_nowait() for _ in range(self._inbox.qsize()))])
        self._publish()  # before a step, which may take long, so that heartbeats include its requests
        self._flush()

    def _carry_out(self, commands: Iterable[object]) -> None:
        for command in commands:
            if command is not None:
                self._busy, self._worked_at = True, time.monotonic()
                self.apply(command)

    def _flush(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._send(messages)
