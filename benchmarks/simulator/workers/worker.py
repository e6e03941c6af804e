"""What prefill and decode workers share for as long as they have their role: an inbox, steps, heartbeats.

The scheduler is production's; so are heartbeats and what is in them. Steps take what the coefficients say, with noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from benchmarks.simulator.workers.process import Process
from benchmarks.simulator.workers.vitals import heartbeat_of, hello_of
from benchmarks.simulator.world.clock import Timer
from benchmarks.simulator.world.errors import ConservationError
from benchmarks.simulator.world.scenario import PoolSpec
from common.config import WorkerConfig
from common.engine.kv.block_log import BlockLog
from common.engine.kv.block_pool import BlockPool
from common.engine.sequences.scheduler import Scheduler
from common.engine.sequences.sequence import WorkerSequence
from common.engine.worker.contract import RouterLost
from common.latency.step_model import StepModel, StepShape
from common.wire.messages import (
    BlockSnapshotRequest,
    ChangeRole,
    DecodeRequest,
    Message,
    PrefillRequest,
    RequestFailed,
    RouterHello,
    TokenDelta,
    TokenOutput,
    ToRouter,
    WorkerHeartbeat,
    WorkerHello,
)

S = TypeVar("S", bound=WorkerSequence)
AnyWorker: TypeAlias = "SimulatedWorker[Any]"
SimulatedProcess: TypeAlias = Process[AnyWorker]
LEAST_NOISE = 0.5
"""No step takes less than this share of its time, however the dice fall."""
KNOWN_STEPS = 1000
"""From so many steps workers learnt the coefficients that they report: goals turn their knobs from 64 on."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a router."""

    router: bytes
    message: Message


class SimulatedWorker(ABC, Generic[S]):
    """What a process does in one role, through all the times that it has it. It serves while it is `alive`."""

    scheduler: Scheduler[S]
    drains_since: float | None
    _beaten: WorkerHeartbeat | None  # the latest load reported, at `_beaten_at`

    def __init__(self, process: SimulatedProcess, pool: PoolSpec) -> None:
        """`pool` is that of the process, in the role of this worker."""
        self.process, self.world, self.pool = process, process.world, pool
        self.name, self.address, self.role = process.name, process.address, pool.role
        self.inbound, self.outbound = process.inbound, process.outbound
        self.num_steps = self.num_prompt_tokens = self.num_output_tokens = 0
        self._chance = process.chance
        self.reachable = self.alive = False
        self.epoch = 0
        self._reset()
        self.slow_down(1.0)

    @property
    @abstractmethod
    def settings(self) -> WorkerConfig:
        """Its process's settings."""

    def step_s(self, shape: StepShape) -> float:
        """The time of a step, without noise."""
        return self._known_model.seconds(shape)

    # ------------------------------------------------------------ its life

    def begin(self, epoch: int) -> None:
        """Serve from now on, with an empty block pool."""
        self.epoch = epoch
        self._reset()
        self.alive = self.reachable = True

    def end(self, *, said: bool) -> None:
        """Serve no longer. `said`: connections break; else messages to it are lost."""
        if self.alive:
            self._settle()
            self._flush()
        self.alive = False
        self.reachable = self.reachable and not said
        for transfer in self.transfers():
            transfer()
        self._reset()

    def drain(self) -> None:
        """Take no new requests, and tell so at once."""
        self.world.attentive.add(self.address)
        if self.drains_since is None:
            self.drains_since = self.world.clock.now
            self._tell_state()

    def serve_again(self) -> None:
        """Take new requests again."""
        self.drains_since = None
        self._tell_state()

    def close(self) -> None:
        """Report not to be ready. Raises ConservationError for blocks that no request left."""
        self.is_closed = True
        self._tell_state()
        counts = self.scheduler.check_integrity()
        if counts.owned or len(self.scheduler):
            raise ConservationError(
                f"{self.name} changes its role with {counts} blocks and {len(self.scheduler)} requests"
            )

    @property
    def is_empty(self) -> bool:
        """Whether no request is here in any state."""
        return not len(self.scheduler) and not self._inbox

    def changed(self) -> None:
        """What it reports is no longer so."""
        self._beats.clear()
        self._beaten = None
        self.world.stir(self.address)

    def _tell_state(self) -> None:
        self.changed()
        for router in self.world.routers:
            self.world.tell_router(router, self.address, (self.heartbeat(router),))

    def _reset(self) -> None:
        """As a new process is: nothing is known or cached."""
        pool, block_size = self.pool, self.world.scenario.model.block_size
        self.block_log = BlockLog(self.epoch)
        self._wanting: set[bytes] = set()  # routers that asked for a snapshot
        self._has_turned = True  # since it last told of its blocks, which only turns change
        self.scheduler = self._new_scheduler(BlockPool(pool.num_blocks, block_size, log=self.block_log))
        self._learnt = self.process.learnt(self.role)
        self._inbox: list[object] = []
        self._outbox: defaultdict[bytes, list[ToRouter]] = defaultdict(list)
        self._deltas: defaultdict[bytes, list[TokenDelta]] = defaultdict(list)
        self._serials: dict[bytes, int] = {}
        self._is_woken = False
        self.drains_since, self.is_closed = None, False
        self._step_timer: Timer | None = None
        self.published_at = 0.0
        self._beats: dict[bytes, WorkerHeartbeat] = {}
        self._beaten = None
        self._beaten_at = 0.0

    # ------------------------------------------------------------ messages

    def hear(self, router: bytes, message: Message) -> None:
        if not self.alive:
            return
        if isinstance(message, RouterHello):
            self.process.greet(router, message)
            self.world.tell_router(router, self.address, (self.hello(), self.heartbeat(router)))
        elif isinstance(message, BlockSnapshotRequest):
            self._wanting.add(router)
            self.world.attentive.add(self.address)
        elif isinstance(message, ChangeRole):
            self.process.order(message)
        elif self.drains_since is not None and isinstance(message, PrefillRequest | DecodeRequest):
            self.world.tell_router(router, self.address, (self._refusal(message),))
        else:
            self.take(Received(router, message))

    def lose_router(self, router: bytes) -> None:
        """End the requests of a router that is gone."""
        self.process.lose(router)
        self._wanting.discard(router)
        self.take(RouterLost(router))

    def take(self, command: object) -> None:
        if not self.alive:
            return
        self.world.stir(self.address)
        self._inbox.append(command)
        if self._step_timer is not None:
            self._interrupt()
        elif not self._is_woken:
            self._is_woken = True
            epoch = self.epoch
            self.world.clock.after(0.0, lambda: self._turn(epoch))

    def tell_blocks(self) -> None:
        """Tell every router what changed in the prefix cache, or all that is in it; before each heartbeat."""
        if not (self._has_turned or self._wanting):
            return
        self._has_turned = False
        events, (wanting, self._wanting) = self.block_log.take(), (self._wanting, set())
        if events:
            self._beats.clear()
            self._beaten = None
        for router in self.world.routers if events else wanting:
            messages = self.block_log.snapshot() if router in wanting else events
            self.world.tell_router(router, self.address, messages)

    def hello(self) -> WorkerHello:
        """Who it is, in this role."""
        return hello_of(self)

    def heartbeat(self, router: bytes) -> WorkerHeartbeat:
        """What it would report now. One that does nothing says the same again."""
        known = self._beats.get(router)
        if known is not None and self._step_timer is None:
            return known
        serial = self._serials.get(router, 0)
        if self._beaten is None or self._beaten_at != self.world.clock.now:
            self._beaten, self._beaten_at = heartbeat_of(self), self.world.clock.now
        beat = self._beats[router] = msgspec.structs.replace(self._beaten, serial=serial) if serial else self._beaten
        return beat

    def still_says(self, router: bytes, beat: WorkerHeartbeat) -> bool:
        """Whether this is what it would report until another command comes."""
        return self.alive and self._step_timer is None and not self._inbox and self._beats.get(router) is beat

    @property
    def model(self) -> StepModel:
        """What the worker knows of its steps."""
        if self.world.scenario.fit:
            return self._learnt.fit.model
        return self._known_model if self._learnt.has_stepped or self.world.scenario.warm else StepModel()

    def slow_down(self, factor: float) -> None:
        """From now on, steps take `factor` times as long as the pool's coefficients say."""
        model = self.pool.coefficients.model(self.world.scenario.noise, factor)
        self._known_model = msgspec.structs.replace(model, num_steps=max(KNOWN_STEPS, model.num_steps))
        self.changed()

    # ------------------------------------------------------------ turns

    def _turn(self, epoch: int) -> None:
        """As an engine's loop: commands, then a step if there is one to compute."""
        if not self.alive or epoch != self.epoch:
            return
        self._is_woken, self._has_turned = False, True
        self._beats.clear()
        self._beaten = None
        self.published_at = self.world.clock.now
        commands, self._inbox = self._inbox, []
        for command in commands:
            if isinstance(command, RouterLost):
                self._end_requests_of(command.router)
            else:
                self._apply(command)
        step_s = self._begin(self.world.clock.now)
        if step_s is not None:
            self._set_step_timer(step_s)
        self._flush()

    def _set_step_timer(self, step_s: float) -> None:
        epoch = self.epoch
        self._step_timer = self.world.clock.after(step_s, lambda: self._step_ended(epoch))

    def _step_ended(self, epoch: int) -> None:
        if not self.alive or epoch != self.epoch:
            return
        self._step_timer = None
        self._complete(self.world.clock.now)
        self._turn(epoch)

    def _noise(self, num_steps: int = 1) -> float:
        """What the time of so many steps is multiplied by."""
        noise = self.world.scenario.noise
        return max(LEAST_NOISE, 1.0 + self._chance.gauss(0.0, noise / num_steps**0.5)) if noise else 1.0

    def _stepped(self, shape: StepShape, step_s: float, num_steps: int = 1) -> None:
        self.num_steps += num_steps
        self._learnt.has_stepped = True
        if self.world.scenario.fit:
            self._learnt.fit.observe(shape, step_s)

    def _end_requests_of(self, router: bytes) -> None:
        self._serials.pop(router, None)
        for sequence in self.scheduler:
            if sequence.router == router:
                self._drop(sequence, "router lost")

    def _fail(self, sequence: S, phase: str, why: str) -> None:
        """Give a request up; another worker may succeed."""
        self._drop(sequence, why)
        self.refuse(sequence.router, sequence.request_id, sequence.attempt, phase, why)

    def _refusal(self, message: PrefillRequest | DecodeRequest) -> RequestFailed:
        """Its router sent it before it heard of the drain."""
        return RequestFailed(
            worker_id=self.name,
            request_id=message.request_id,
            attempt=message.attempt,
            phase="queue",
            message="the worker is draining",
            retryable=True,
        )

    def refuse(self, router: bytes, request_id: str, attempt: int, phase: str, why: str) -> None:
        """Tell a router that this worker does not do it; another one may."""
        failed = RequestFailed(
            worker_id=self.name, request_id=request_id, attempt=attempt, phase=phase, message=why, retryable=True
        )
        self._outbox[router].append(failed)

    def _flush(self) -> None:
        for router, deltas in self._deltas.items():
            self._outbox[router].append(TokenOutput(worker_id=self.name, epoch=self.epoch, outputs=tuple(deltas)))
        self._deltas.clear()
        for router, messages in self._outbox.items():
            self.world.tell_router(router, self.address, messages)
        self._outbox.clear()

    # ------------------------------------------------------------ what the two kinds do

    @abstractmethod
    def _new_scheduler(self, pool: BlockPool) -> Scheduler[S]: ...

    @abstractmethod
    def _apply(self, command: object) -> None:
        """Carry a command out, between two steps."""

    @abstractmethod
    def _begin(self, now: float) -> float | None:
        """Begin a step: the seconds until it ends; None when there is nothing to compute."""

    @abstractmethod
    def _complete(self, now: float) -> None:
        """The step that was begun has ended."""

    @abstractmethod
    def _drop(self, sequence: S, why: str) -> None:
        """Forget a sequence without a word to its router."""

    @abstractmethod
    def transfers(self) -> list[Callable[[], None]]:
        """What drops each transfer of this life."""

    def _interrupt(self) -> None:
        """A command came during a step."""

    def _settle(self) -> None:
        """Bring what is counted up to the present, before the worker dies."""

    def grown(self) -> tuple[int, int]:
        """Blocks and tokens that running sequences have gained since they were last counted."""
        return 0, 0

    def beside(self) -> StepShape:
        """What steps compute beside prompts."""
        return StepShape()
