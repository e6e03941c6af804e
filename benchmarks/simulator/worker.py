"""What simulated prefill and decode workers share: a life, an inbox, steps, heartbeats. It models `common/worker`.

The scheduler is production's; so are heartbeats and what is in them. Steps take what the coefficients say, with noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from benchmarks.simulator.clock import Timer
from benchmarks.simulator.network import Link
from benchmarks.simulator.scenario import PoolSpec
from benchmarks.simulator.world import World
from common.kv.block_log import BlockLog
from common.kv.block_pool import BlockPool
from common.latency.step_fit import StepFit
from common.latency.step_model import StepModel, StepShape
from common.requests.scheduler import Scheduler
from common.requests.sequence import WorkerSequence
from common.wire.messages import (
    BlockSnapshotRequest,
    Message,
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
LEAST_NOISE = 0.5
"""No step takes less than this share of its time, however the dice fall."""
KNOWN_STEPS = 1000
"""From so many steps workers learnt the coefficients that they report: goals turn their knobs from 64 on."""
NEVER_S = 1e9
"""Simulated engines do not get stuck."""
FINGERPRINT = "simulated"


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a router."""

    router: bytes
    message: Message


class SimulatedWorker(ABC, Generic[S]):
    """One worker, through all of its lives."""

    scheduler: Scheduler[S]
    _drains_since: float | None
    _beaten: WorkerHeartbeat | None  # the latest load reported, at `_beaten_at`

    def __init__(self, world: World, pool: PoolSpec, name: str, address: str) -> None:
        self.world, self.pool, self.name, self.address = world, pool, name, address
        self.inbound, self.outbound = Link(f"{name} in", pool.link_rate), Link(f"{name} out", pool.link_rate)
        self.num_steps = self.num_prompt_tokens = self.num_output_tokens = 0
        self._chance = world.chance(name)
        self._began_at = self._past_up_s = 0.0
        self._exists = self.reachable = self.alive = False
        self.epoch = 0
        self._reset()
        self.slow_down(1.0)

    def step_s(self, shape: StepShape) -> float:
        """The time of a step, without noise."""
        return self._known_model.seconds(shape)

    # ------------------------------------------------------------ its life

    def start(self, *, ready: bool = False) -> None:
        """Start a process that is ready after the pool's `start_s`, or at once."""
        self._exists, self._began_at = True, self.world.clock.now
        self.epoch = self.world.new_epoch()
        epoch = self.epoch
        self.world.clock.after(0.0 if ready else self.pool.start_s, lambda: self.become_ready(epoch))

    def become_ready(self, epoch: int) -> None:
        """The process that was started as `epoch` serves from now on, unless it died meanwhile."""
        if not self._exists or epoch != self.epoch:
            return
        self._reset()
        self.alive = self.reachable = True
        for router in self.world.routers.values():
            router.on_up(self.address)

    def die(self, *, said: bool, back_s: float = 0.0) -> None:
        """The process ends. `said`: connections break; else messages to it are lost, and its routers only miss it."""
        clock = self.world.clock
        if not self._exists:
            return
        self.world.stir(self.address)
        if self.alive:
            self._settle()
            self._flush()
        self._past_up_s = self.up_s
        self._exists = self.alive = False
        self.reachable = self.reachable and not said
        for transfer in self._transfers():
            transfer()
        self._reset()
        if said:
            self.world.soon(self._cut)
        if back_s:
            clock.after(back_s, self.start)

    def _cut(self) -> None:
        for router in self.world.routers.values():
            router.on_cut(self.address)

    def drain(self) -> None:
        """Take no new requests, and end once the last one has ended."""
        if self.alive:
            self._drains_since = self.world.clock.now
            self.world.stir(self.address)
            self._beats.clear()
            self._beaten = None
        else:
            self.die(said=True)

    @property
    def has_drained(self) -> bool:
        """Whether it may end: it has none left, and every router knows that it takes no more."""
        if self._drains_since is None or len(self.scheduler) or self._inbox:
            return False
        return self.world.clock.now - self._drains_since > 2 * self.world.scenario.heartbeat_s

    @property
    def up_s(self) -> float:
        """How long it was there so far, the time of its starts included."""
        return self._past_up_s + (self.world.clock.now - self._began_at if self._exists else 0.0)

    def _reset(self) -> None:
        """As a new process is: nothing is known or cached."""
        pool, block_size = self.pool, self.world.scenario.model.block_size
        self._block_log = BlockLog(self.epoch)
        self._wanting: set[bytes] = set()  # routers that asked for a snapshot
        self._has_turned = True  # since it last told of its blocks, which only turns change
        self.scheduler = self._new_scheduler(BlockPool(pool.num_blocks, block_size, log=self._block_log))
        self.step_fit = StepFit()
        self._has_stepped = False
        self._inbox: list[object] = []
        self._outbox: defaultdict[bytes, list[ToRouter]] = defaultdict(list)
        self._deltas: defaultdict[bytes, list[TokenDelta]] = defaultdict(list)
        self._serials: dict[bytes, int] = {}
        self._is_woken = False
        self._drains_since = None
        self._step_timer: Timer | None = None
        self._published_at = 0.0
        self._beats: dict[bytes, WorkerHeartbeat] = {}
        self._beaten = None
        self._beaten_at = 0.0

    # ------------------------------------------------------------ messages

    def hear(self, router: bytes, message: Message) -> None:
        if not self.alive:
            return
        if isinstance(message, RouterHello):
            self.world.tell_router(router, self.address, (self.hello(), self.heartbeat(router)))
        elif isinstance(message, BlockSnapshotRequest):
            self._wanting.add(router)
        else:
            self.take(Received(router, message))

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

    def hello(self) -> WorkerHello:
        model = self.world.scenario.model
        return WorkerHello(
            worker_id=self.name,
            role=self.pool.role,
            epoch=self.epoch,
            fingerprint=FINGERPRINT,
            model=FINGERPRINT,
            block_size=model.block_size,
            num_blocks=self.pool.num_blocks,
            max_model_len=model.max_model_len,
            max_num_seqs=self.pool.num_seqs,
            kv_address=self.address if self.pool.role == "decode" else "",
            weights=FINGERPRINT,
            max_step_tokens=self.pool.step_tokens,
        )

    def tell_blocks(self) -> None:
        """Tell every router what changed in the prefix cache, or all that is in it; before each heartbeat."""
        if not (self._has_turned or self._wanting):
            return
        self._has_turned = False
        events, (wanting, self._wanting) = self._block_log.take(), (self._wanting, set())
        if events:
            self._beats.clear()
            self._beaten = None
        for router in self.world.routers if events else wanting:
            messages = self._block_log.snapshot() if router in wanting else events
            self.world.tell_router(router, self.address, messages)

    def heartbeat(self, router: bytes) -> WorkerHeartbeat:
        """What it would report now. One that does nothing says the same again."""
        known = self._beats.get(router)
        if known is not None and self._step_timer is None:
            return known
        serial = self._serials.get(router, 0)
        if self._beaten is None or self._beaten_at != self.world.clock.now:
            self._beaten, self._beaten_at = self._report_load(), self.world.clock.now
        beat = self._beats[router] = msgspec.structs.replace(self._beaten, serial=serial) if serial else self._beaten
        return beat

    def still_says(self, router: bytes, beat: WorkerHeartbeat) -> bool:
        """Whether this is what it would report until another command comes."""
        return self.alive and self._step_timer is None and not self._inbox and self._beats.get(router) is beat

    def _report_load(self) -> WorkerHeartbeat:
        """What every router hears."""
        scheduler = self.scheduler
        model = self.model if self.world.scenario.reports_steps else StepModel()
        waiting, counts = scheduler.waiting_shape, scheduler.pool.counts
        num_more, more_context = self._grown()
        num_taken = min(num_more, counts.free + counts.cached)
        waiting_s = model.steps_s(waiting, scheduler.max_step_tokens, self._beside()) if waiting.num_tokens else 0.0
        return WorkerHeartbeat(
            worker_id=self.name,
            epoch=self.epoch,
            step=self.num_steps,
            ready=True,
            draining=self._drains_since is not None,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_transferring=scheduler.num_in_transfer,
            num_waiting_tokens=waiting.num_tokens,
            num_free_blocks=max(0, counts.free - num_taken),
            num_cached_blocks=counts.cached - max(0, num_taken - counts.free),
            num_owned_blocks=counts.owned + num_taken,
            turn_limit_s=NEVER_S,
            waiting_s=max(0.0, waiting_s - (self.world.clock.now - self._published_at)),
            num_context_tokens=scheduler.num_context_tokens + more_context,
            step_model=model,
            block_sequence=self._block_log.sequence,
            batch_cap=scheduler.batch_cap.value,
            step_tokens=scheduler.max_step_tokens,
        )

    @property
    def model(self) -> StepModel:
        """What the worker knows of its steps."""
        if self.world.scenario.fit:
            return self.step_fit.model
        return self._known_model if self._has_stepped or self.world.scenario.warm else StepModel()

    def slow_down(self, factor: float) -> None:
        """From now on, steps take `factor` times as long as the pool's coefficients say."""
        model = self.pool.coefficients.model(self.world.scenario.noise, factor)
        self._known_model = msgspec.structs.replace(model, num_steps=max(KNOWN_STEPS, model.num_steps))
        self._beats.clear()
        self._beaten = None
        self.world.stir(self.address)

    # ------------------------------------------------------------ turns

    def _turn(self, epoch: int) -> None:
        """As an engine's loop: commands, then a step if there is one to compute."""
        if not self.alive or epoch != self.epoch:
            return
        self._is_woken, self._has_turned = False, True
        self._beats.clear()
        self._beaten = None
        self._published_at = self.world.clock.now
        commands, self._inbox = self._inbox, []
        for command in commands:
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
        self._has_stepped = True
        if self.world.scenario.fit:
            self.step_fit.observe(shape, step_s)

    def _fail(self, sequence: S, phase: str, why: str) -> None:
        """Give a request up; another worker may succeed."""
        self._drop(sequence, why)
        self._refuse(sequence.router, sequence.request_id, sequence.attempt, phase, why)

    def _refuse(self, router: bytes, request_id: str, attempt: int, phase: str, why: str) -> None:
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
    def _transfers(self) -> list[Callable[[], None]]:
        """What drops each transfer of this life."""

    def _interrupt(self) -> None:
        """A command came during a step."""

    def _settle(self) -> None:
        """Bring what is counted up to the present, before the worker dies."""

    def _grown(self) -> tuple[int, int]:
        """Blocks and tokens that running sequences have gained since they were last counted."""
        return 0, 0

    def _beside(self) -> StepShape:
        """What steps compute beside prompts."""
        return StepShape()
