"""Runs a scenario: routers, workers, network and requests on one clock, until every request has ended."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.simulator.conservation import Conserved, check_conserved
from benchmarks.simulator.router import CONNECTION_LOST, SimulatedRouter
from benchmarks.simulator.workers.decode import SimulatedDecodeWorker
from benchmarks.simulator.workers.prefill import SimulatedPrefillWorker
from benchmarks.simulator.workers.worker import AnyWorker, SimulatedProcess
from benchmarks.simulator.world.load import SimulatedRequest, requests_of
from benchmarks.simulator.world.scenario import EventSpec, PoolSpec, Scenario
from benchmarks.simulator.world.world import World
from common.config import RouterConfig
from common.config.field import fields_of
from common.errors import ConfigError
from router.garbage import THRESHOLDS
from router.policy import load_policy

SLOTS = 8
"""Workers beat at so many times within an interval; those of a slot beat together."""
SETTLE_S, MOST_SETTLING = 1.0, 600
"""Once every request has ended, workers get so long, so often at most, to end their steps and hear of aborts."""
PATIENT_S = 3600.0
"""For router settings that end what makes no progress: simulated workers send no reports of progress."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation leaves: its requests, and counts. `seconds` are virtual. Hand-overs are counted by outcome.

    `others` are those of other models.
    """

    scenario: Scenario
    requests: Sequence[SimulatedRequest]
    seconds: float
    num_events: int
    worker_seconds: float
    num_choices: Counter[str]
    num_retries: Counter[str]
    num_handovers: Counter[str]
    num_role_changes: int
    num_policy_errors: int
    conserved: Conserved
    others: Sequence[Run] = ()


class Simulation:
    """Raises ConfigError and TraceError for a scenario that cannot be simulated."""

    def __init__(self, scenario: Scenario, *, most_steps: int | None = None, beside: World | None = None) -> None:
        """Decode workers take at most `most_steps` steps at once, by default as many as are alike.

        `beside` is the world of another model that runs in the same time.
        """
        self.scenario, self._most_steps = scenario, most_steps
        self.requests = requests_of(scenario)
        if not self.requests:
            raise ConfigError("load", scenario.load, "a load of at least one request")
        by_id = {request.request_id: request for request in self.requests}
        self.world = beside.beside(scenario, by_id) if beside else World(scenario, by_id)
        self.processes: dict[str, SimulatedProcess] = {}
        self._slots: list[dict[str, SimulatedProcess]] = [{} for _ in range(SLOTS)]  # by address
        self._num_left = len(self.requests)
        self._next = 0
        self._sizes = Counter[str]()
        for pool in scenario.pool:
            for _ in range(pool.count):
                self._add_process(pool)
        self.routers: list[SimulatedRouter] = []
        for _ in range(scenario.routers):
            self._add_router()
        self._fronts = list(self.routers)
        for event in scenario.event:
            self.world.clock.at(event.at_s, self._happening(event))
        self._ended_at = self._worker_seconds = 0.0
        self.others = [Simulation(other, most_steps=most_steps, beside=self.world) for other in scenario.also]

    @property
    def num_requests(self) -> int:
        """Of all models."""
        return len(self.requests) + sum(len(other.requests) for other in self.others)

    def run(self, progress: Callable[[int, float], None] = lambda num_over, now: None) -> Run:
        """Simulate until every request has ended. `progress` hears of their number, and of the virtual time."""
        with _silent_routers(), _seldom_collected():
            return self._run(progress)

    def _run(self, progress: Callable[[int, float], None]) -> Run:
        clock, models = self.world.clock, (self, *self.others)
        for one in models:
            one._begin()
        for one in models:  # until each has none left: the time is that of all
            while one._num_left:
                clock.step()
                if clock.num_events % 4096 == 0:
                    progress(self.num_requests - sum(each._num_left for each in models), clock.now)
        for one in models:
            one._settle()
        return self._left([other._left() for other in self.others])

    def _begin(self) -> None:
        for process in self.processes.values():  # those of the beginning are ready
            process.start(ready=True)
        self._beat(0)
        for index, router in enumerate(self.routers):
            self._tick(router, index / len(self.routers) * self.scenario.heartbeat_s)
        self.world.clock.at(self.requests[0].arrival_s, self._arrive)

    def _left(self, others: Sequence[Run] = ()) -> Run:
        counters = [router.core.counters for router in self.routers]
        return Run(
            self.scenario,
            self.requests,
            self._ended_at,
            self.world.clock.num_events,
            self._worker_seconds,
            sum((one.num_choices for one in counters), Counter[str]()),
            sum((one.num_retries for one in counters), Counter[str]()),
            sum((one.num_handovers for one in counters), Counter[str]()),
            sum(process.num_role_changes for process in self.processes.values()),
            sum(one.num_policy_errors for one in counters),
            check_conserved(self.world, list(self.processes.values()), self.routers, self.requests),
            others,
        )

    def _settle(self) -> None:
        """Go on until no worker has a sequence left."""
        clock = self.world.clock
        for _ in range(MOST_SETTLING):
            until_s = clock.now + SETTLE_S
            while clock.now < until_s:
                clock.step()
            if not any(len(process.duty.scheduler) for process in self.processes.values()):
                return

    # ------------------------------------------------------------ parts

    @property
    def workers(self) -> dict[str, AnyWorker]:
        """By name, in the roles that they have now."""
        return {name: process.duty for name, process in self.processes.items()}

    def _add_process(self, pool: PoolSpec) -> SimulatedProcess:
        name = f"{pool.name}-{self._sizes[pool.name]}"
        self._sizes[pool.name] += 1
        process = SimulatedProcess(self.world, pool, name, self._new_duty)
        self._slots[len(self.processes) % SLOTS][process.address] = process
        self.processes[name] = process
        return process

    def _new_duty(self, process: SimulatedProcess, pool: PoolSpec) -> AnyWorker:
        if pool.role == "prefill":
            return SimulatedPrefillWorker(process, pool)
        worker = SimulatedDecodeWorker(process, pool)
        worker.most_steps = self._most_steps or worker.most_steps
        return worker

    def _add_router(self) -> SimulatedRouter:
        scenario, number = self.scenario, len(self.routers)
        name = f"router-{number}".encode()
        config = self._router_config()
        chance = self.world.chance(f"policy/{number}")
        policy = load_policy(scenario.policy, config.local_prefill_threshold, chance, field="policy")
        router = SimulatedRouter(self.world, name, config, policy, self._on_over)
        self.world.routers[name] = router
        self.routers.append(router)
        return router

    def _router_config(self) -> RouterConfig:
        """Defaults, but for what the scenario says, and for bounds that a simulation has no reason for."""
        scenario = self.scenario
        known = {field.name: field for field in fields_of(RouterConfig)}
        values: dict[str, Any] = {
            "max_inflight": 1_000_000,
            "heartbeat_s": scenario.heartbeat_s,
            "prefill_timeout_s": PATIENT_S,
            "token_timeout_s": PATIENT_S,
            "slo_ttft_ms": scenario.goals.ttft_ms,
            "slo_tpot_ms": scenario.goals.tpot_ms,
        }
        for setting, value in scenario.settings.items():
            if setting not in known:
                raise ConfigError(f"settings.{setting}", value, "the name of a router setting")
            values[setting] = known[setting].coerce(value)
        for role in ("prefill", "decode"):
            addresses = tuple(one.address for one in self.processes.values() if one.home.role == role)
            values[role] = addresses
        return RouterConfig(**values)

    # ------------------------------------------------------------ what happens

    def _arrive(self) -> None:
        """A request arrives at the next router in turn, of those that serve."""
        request, self._next = self.requests[self._next], self._next + 1
        if self._next < len(self.requests):
            self.world.clock.at(self.requests[self._next].arrival_s, self._arrive)
        if not self._fronts:
            request.outcome, request.ended_at = CONNECTION_LOST, self.world.clock.now
            self._on_over(request)
            return
        router = self._fronts[request.number % len(self._fronts)]
        way_s = self.scenario.ingress_s + self.scenario.ingress_token_s * request.content.num_prompt_tokens
        if way_s:
            self.world.clock.after(way_s, lambda: router.ask(request))
        else:
            router.ask(request)

    def _on_over(self, request: SimulatedRequest) -> None:
        self._num_left -= 1
        request.content.forget()
        if not self._num_left:
            self._ended_at = self.world.clock.now
            self._worker_seconds = sum(process.up_s for process in self.processes.values())

    def _beat(self, slot: int) -> None:
        """The workers of one slot send heartbeats, but for those that would say the same as before."""
        world, scenario = self.world, self.scenario
        quiet = [router.quiet for router in world.routers.values()]
        silent = set.intersection(*quiet) - world.attentive if quiet else set[str]()
        here = [process for address, process in self._slots[slot].items() if address not in silent]
        for process in here:
            if process.has_left:
                process.die(said=True)
        beating = [process.duty for process in here if process.duty.alive]
        for worker in beating:
            worker.tell_blocks()
        for name, router in world.routers.items():
            quiet_there = router.quiet
            beats = [(one.address, one.heartbeat(name)) for one in beating if one.address not in quiet_there]
            world.soon(partial(router.hear_beats, beats))
        world.clock.after(scenario.heartbeat_s / SLOTS, lambda: self._beat((slot + 1) % SLOTS))

    def _tick(self, router: SimulatedRouter, after_s: float) -> None:
        def tick() -> None:
            if not router.alive:
                return
            router.tick()
            if router not in self._fronts and router.is_ready:
                self._fronts.append(router)
            self._tick(router, self.scenario.heartbeat_s)

        self.world.clock.after(after_s, tick)

    def _happening(self, event: EventSpec) -> Callable[[], None]:
        def happen() -> None:
            match event.kind:
                case "death" | "silence":
                    self.processes[event.worker].die(said=event.kind == "death", back_s=event.back_s)
                case "router_death":
                    self._end_router(event)
                case "stop":
                    self.processes[event.worker].stop()
                case "slow":
                    self.processes[event.worker].slow_down(event.factor)
                case "start":
                    self._start_one(next(pool for pool in self.scenario.pool if pool.name == event.worker))

        return happen

    def _end_router(self, event: EventSpec) -> None:
        router = next(one for one in self.routers if one.name.decode() == event.worker)
        if not router.alive:
            return
        if router in self._fronts:
            self._fronts.remove(router)
        router.die()
        if event.back_s:
            self.world.clock.after(event.back_s, lambda: self._tick(self._add_router(), 0.0))

    def _start_one(self, pool: PoolSpec) -> None:
        process = self._add_process(pool)
        for router in self.routers:
            router.registry.add(process.address, pool.role)
        process.start()


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Look for garbage that refers to itself as seldom as routers do: what happens here leaves hardly any."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _silent_routers() -> Iterator[None]:
    """Log lines of virtual time say the wrong time: only errors are logged meanwhile."""
    log = logging.getLogger("router")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
