"""Runs a scenario: routers, workers, network and requests on one clock, until every request has ended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.simulator.conservation import Conserved, check_conserved
from benchmarks.simulator.decode import SimulatedDecodeWorker
from benchmarks.simulator.load import SimulatedRequest, requests_of
from benchmarks.simulator.policies import POLICIES
from benchmarks.simulator.prefill import SimulatedPrefillWorker
from benchmarks.simulator.router import SimulatedRouter
from benchmarks.simulator.scenario import EventSpec, PoolSpec, Scenario
from benchmarks.simulator.world import World, address_of
from common.config import RouterConfig
from common.config.field import fields_of
from common.errors import ConfigError
from router.dispatch.policy import RoutingPolicy

SLOTS = 8
"""Workers beat at so many times within an interval; those of a slot beat together."""
SETTLE_S, MOST_SETTLING = 1.0, 600
"""Once every request has ended, workers get so long, so often at most, to end their steps and hear of aborts."""
PATIENT_S = 3600.0
"""For router settings that end what makes no progress: simulated workers send no reports of progress."""

Worker = SimulatedPrefillWorker | SimulatedDecodeWorker


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation leaves: its requests, and counts. `seconds` are virtual."""

    scenario: Scenario
    requests: Sequence[SimulatedRequest]
    seconds: float
    num_events: int
    worker_seconds: float
    num_choices: Counter[str]
    num_retries: Counter[str]
    conserved: Conserved


class Simulation:
    """Raises ConfigError and TraceError for a scenario that cannot be simulated."""

    def __init__(self, scenario: Scenario, *, most_steps: int | None = None) -> None:
        """Decode workers take at most `most_steps` steps at once, by default as many as are alike."""
        self.scenario, self._most_steps = scenario, most_steps
        self.requests = requests_of(scenario)
        if not self.requests:
            raise ConfigError("load", scenario.load, "a load of at least one request")
        self.world = World(scenario, {request.request_id: request for request in self.requests})
        self.workers: dict[str, Worker] = {}
        self._slots: list[dict[str, Worker]] = [{} for _ in range(SLOTS)]  # by address
        self._num_left = len(self.requests)
        self._next = 0
        self._sizes = Counter[str]()
        for pool in scenario.pool:
            for _ in range(pool.count):
                self._add_worker(pool)
        self.routers = [self._router(number) for number in range(scenario.routers)]
        for event in scenario.event:
            self.world.clock.at(event.at_s, self._happening(event))

    def run(self, progress: Callable[[int, float], None] = lambda num_over, now: None) -> Run:
        """Simulate until every request has ended. `progress` hears of their number, and of the virtual time."""
        with _silent_routers():
            return self._run(progress)

    def _run(self, progress: Callable[[int, float], None]) -> Run:
        clock = self.world.clock
        for worker in self.workers.values():  # those of the beginning are ready
            worker.start(ready=True)
        self._beat(0)
        for index, router in enumerate(self.routers):
            self._tick(router, index / len(self.routers) * self.scenario.heartbeat_s)
        clock.at(self.requests[0].arrival_s, self._arrive)
        while self._num_left:
            clock.step()
            if clock.num_events % 4096 == 0:
                progress(len(self.requests) - self._num_left, clock.now)
        ended_at, worker_seconds = clock.now, sum(worker.up_s for worker in self.workers.values())
        self._settle()
        return Run(
            self.scenario,
            self.requests,
            ended_at,
            clock.num_events,
            worker_seconds,
            sum((router.core.counters.num_choices for router in self.routers), Counter[str]()),
            sum((router.core.counters.num_retries for router in self.routers), Counter[str]()),
            check_conserved(self.world, list(self.workers.values()), self.routers, self.requests),
        )

    def _settle(self) -> None:
        """Go on until no worker has a sequence left."""
        clock = self.world.clock
        for _ in range(MOST_SETTLING):
            until_s = clock.now + SETTLE_S
            while clock.now < until_s:
                clock.step()
            if not any(len(worker.scheduler) for worker in self.workers.values()):
                return

    # ------------------------------------------------------------ parts

    def _add_worker(self, pool: PoolSpec) -> Worker:
        name = f"{pool.name}-{self._sizes[pool.name]}"
        self._sizes[pool.name] += 1
        worker: Worker
        if pool.role == "prefill":
            worker = SimulatedPrefillWorker(self.world, pool, name, address_of(name))
        else:
            worker = SimulatedDecodeWorker(self.world, pool, name, address_of(name))
            worker.most_steps = self._most_steps or worker.most_steps
        self._slots[len(self.workers) % SLOTS][worker.address] = worker
        self.workers[name] = self.world.workers[worker.address] = worker
        return worker

    def _router(self, number: int) -> SimulatedRouter:
        scenario, name = self.scenario, f"router-{number}".encode()
        if scenario.policy not in POLICIES:
            raise ConfigError("policy", scenario.policy, "one of " + ", ".join(POLICIES))
        config = self._router_config()
        policy: RoutingPolicy = POLICIES[scenario.policy](
            config.local_prefill_threshold, self.world.chance(f"policy/{number}")
        )
        router = SimulatedRouter(self.world, name, config, policy, self._on_over)
        self.world.routers[name] = router
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
                raise ConfigError(f"settings.{setting}", value, "the name of a router's setting")
            values[setting] = known[setting].coerce(value)
        for role in ("prefill", "decode"):
            addresses = tuple(worker.address for worker in self.workers.values() if worker.pool.role == role)
            values[role] = addresses
        return RouterConfig(**values)

    # ------------------------------------------------------------ what happens

    def _arrive(self) -> None:
        """A request arrives at the next router in turn."""
        request, self._next = self.requests[self._next], self._next + 1
        if self._next < len(self.requests):
            self.world.clock.at(self.requests[self._next].arrival_s, self._arrive)
        router = self.routers[request.number % len(self.routers)]
        way_s = self.scenario.ingress_s + self.scenario.ingress_token_s * request.content.num_prompt_tokens
        if way_s:
            self.world.clock.after(way_s, lambda: router.ask(request))
        else:
            router.ask(request)

    def _on_over(self, request: SimulatedRequest) -> None:
        self._num_left -= 1
        request.content.forget()

    def _beat(self, slot: int) -> None:
        """The workers of one slot send heartbeats, but for those that would say the same as before."""
        world, scenario = self.world, self.scenario
        silent = set.intersection(*(router.quiet for router in self.routers)) - world.attentive
        here = [worker for address, worker in self._slots[slot].items() if address not in silent]
        for worker in here:
            if worker.has_drained:
                worker.die(said=True)
        beating = [worker for worker in here if worker.alive]
        for worker in beating:
            worker.tell_blocks()
        for name, router in world.routers.items():
            told = [worker for worker in beating if worker.address not in router.quiet]
            beats = [(worker.address, worker.heartbeat(name)) for worker in told]

            world.soon(partial(router.hear_beats, beats))
        world.clock.after(scenario.heartbeat_s / SLOTS, lambda: self._beat((slot + 1) % SLOTS))

    def _tick(self, router: SimulatedRouter, after_s: float) -> None:
        def tick() -> None:
            router.tick()
            self._tick(router, self.scenario.heartbeat_s)

        self.world.clock.after(after_s, tick)

    def _happening(self, event: EventSpec) -> Callable[[], None]:
        def happen() -> None:
            match event.kind:
                case "death" | "silence":
                    self.workers[event.worker].die(said=event.kind == "death", back_s=event.back_s)
                case "stop":
                    self.workers[event.worker].drain()
                case "slow":
                    self.workers[event.worker].slow_down(event.factor)
                case "start":
                    self._start_one(next(pool for pool in self.scenario.pool if pool.name == event.worker))

        return happen

    def _start_one(self, pool: PoolSpec) -> None:
        worker = self._add_worker(pool)
        for router in self.routers:
            router.registry.add(worker.address, pool.role)
        worker.start()


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
