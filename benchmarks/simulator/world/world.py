"""What every part of a simulation shares: the clock, the network, the requests, and delays of messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.simulator.world.clock import Clock
from benchmarks.simulator.world.load import SimulatedRequest
from benchmarks.simulator.world.network import Link, Network
from benchmarks.simulator.world.scenario import PoolSpec, Scenario
from common.wire.messages import Message, ToRouter, WorkerHeartbeat


class RouterEnd(Protocol):
    """A router, as workers see it. It need not hear heartbeats of workers that are `quiet`."""

    quiet: set[str]

    def hear(self, address: str, message: ToRouter) -> None:
        """A message of a worker has arrived."""

    def hear_beats(self, beats: Sequence[tuple[str, WorkerHeartbeat]]) -> None:
        """Heartbeats of workers have arrived, by address."""

    def on_up(self, address: str) -> None:
        """The connection to a worker has come up."""

    def on_cut(self, address: str) -> None:
        """The connection to a worker broke."""


class TransferEnd(Protocol):
    """A worker, as others see it that send it KV or get KV from it."""

    inbound: Link
    outbound: Link

    def take(self, command: object) -> None:
        """Take a command in its next turn, if it serves."""


class WorkerEnd(Protocol):
    """A worker, as routers see it."""

    name: str
    reachable: bool

    def hear(self, router: bytes, message: Message) -> None:
        """A message of a router has arrived."""

    def lose_router(self, router: bytes) -> None:
        """The connection to a router has been broken for some heartbeats."""

    def still_says(self, router: bytes, beat: WorkerHeartbeat) -> bool:
        """Whether this is what it would report until another command comes."""


def address_of(name: str) -> str:
    """Where routers find the worker of this name."""
    return f"tcp://{name}:7001"


@dataclass(slots=True)
class World:
    """`requests` by id, `routers` by their name in messages, `workers` by address in the roles that they have now.

    `links` are those of all models, in and out, by the name that they share or by their worker. `receivers` are workers
    as decode workers, by name, also while they have the other role. Of those that are quiet for every router, only the
    `attentive` ones have anything to do when they beat.
    """

    scenario: Scenario
    requests: Mapping[str, SimulatedRequest]
    clock: Clock = field(default_factory=Clock)
    network: Network = field(init=False)
    routers: dict[bytes, RouterEnd] = field(default_factory=dict)
    workers: dict[str, WorkerEnd] = field(default_factory=dict)
    receivers: dict[str, TransferEnd] = field(default_factory=dict)
    links: dict[str, tuple[Link, Link]] = field(default_factory=dict)
    attentive: set[str] = field(default_factory=set)
    _num_epochs: int = 0

    def __post_init__(self) -> None:
        self.network = Network(self.clock)

    def beside(self, scenario: Scenario, requests: Mapping[str, SimulatedRequest]) -> World:
        """That of another model, with the same clock, network and links."""
        other = World(scenario, requests, self.clock, links=self.links)
        other.network = self.network
        return other

    def links_of(self, worker: str, pool: PoolSpec) -> tuple[Link, Link]:
        """Into a worker and out of it."""
        name = pool.link or f"{self.scenario.name} {worker}".strip()
        if name not in self.links:
            self.links[name] = (Link(f"{name} in", pool.link_rate), Link(f"{name} out", pool.link_rate))
        return self.links[name]

    def chance(self, name: str) -> random.Random:
        """A source of its own for each name, the same for each run of the scenario."""
        return random.Random(f"{self.scenario.seed}/{name}")

    def new_epoch(self) -> int:
        self._num_epochs += 1
        return self._num_epochs

    def soon(self, then: Callable[[], None]) -> None:
        """Have something happen after the time that a message takes."""
        self.clock.after(self.scenario.message_s, then)

    def stir(self, address: str) -> None:
        """A worker changes: its next heartbeats say something new."""
        for router in self.routers.values():
            router.quiet.discard(address)

    def tell_router(self, router: bytes, address: str, messages: Sequence[ToRouter]) -> None:
        """Messages leave a worker for a router; those for a dead one are lost."""
        end = self.routers.get(router)
        if end is None:
            return

        def arrive() -> None:
            for message in messages:
                end.hear(address, message)

        self.soon(arrive)

    def tell_worker(self, router: bytes, address: str, message: Message) -> bool:
        """A message leaves a router for a worker; False when there is no connection."""
        worker = self.workers.get(address)
        if worker is None or not worker.reachable:
            return False
        self.soon(lambda: worker.hear(router, message))
        return True
