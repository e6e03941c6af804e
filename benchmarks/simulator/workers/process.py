"""A worker's process through its lives, and its duties in each of them. It models `common/engine/worker/duties.py`.

    start ─> ready in its home role ─ChangeRole─> drains ─> `role_change_s` ─> ready in the other role, as a new epoch
                                                    └── requests are left after ROLE_DRAIN_S: goes on as before

What outlasts a duty: its address, its links, what it has learnt of the steps of each role, and which routers it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from benchmarks.simulator.world.scenario import PoolSpec
from benchmarks.simulator.world.world import WorkerEnd, World, address_of
from common.latency.step_fit import StepFit
from common.wire.message_fields import Role
from common.wire.messages import ChangeRole, RouterHello, WorkerHeartbeat, WorkerHello

DRAIN_POLL_S, ROLE_DRAIN_S = 0.02, 30.0
"""How often a worker that is to change its role looks whether it is empty, and for how long, as in life."""


@dataclass(slots=True)
class Learnt:
    """What a process knows of its steps in one role."""

    fit: StepFit = field(default_factory=StepFit)
    has_stepped: bool = False


class SimulatedDuty(WorkerEnd, Protocol):
    """What a process does in one role, as the process sees it."""

    role: Role
    epoch: int
    alive: bool
    drains_since: float | None

    @property
    def is_empty(self) -> bool:
        """Whether no request is here in any state."""

    def begin(self, epoch: int) -> None:
        """Serve from now on, with an empty block pool."""

    def end(self, *, said: bool) -> None:
        """Serve no longer. `said`: connections break; else messages to it are lost."""

    def drain(self) -> None:
        """Take no new requests, and tell so at once."""

    def serve_again(self) -> None:
        """Take new requests again."""

    def close(self) -> None:
        """Report not to be ready."""

    def changed(self) -> None:
        """What it reports is no longer so."""

    def slow_down(self, factor: float) -> None:
        """From now on, steps take `factor` times as long as the pool's coefficients say."""

    def hello(self) -> WorkerHello:
        """Who it is, in this role."""

    def heartbeat(self, router: bytes) -> WorkerHeartbeat:
        """What it would report now."""


D = TypeVar("D", bound=SimulatedDuty)


class Process(Generic[D]):
    """`duty` is what it does at present; `duties` has that of each role that it ever had."""

    duty: D

    def __init__(self, world: World, home: PoolSpec, name: str, begin: Callable[[Process[D], PoolSpec], D]) -> None:
        """`begin` makes the duty of a role, which does not serve yet."""
        self.world, self.home, self.name, self.address = world, home, name, address_of(name)
        self.inbound, self.outbound = world.links_of(name, home)
        self.chance = world.chance(name)
        self.exists, self.num_role_changes = False, 0
        self._begin, self._factor = begin, 1.0
        self._began_at = self._past_up_s = 0.0
        self._learnt: dict[Role, Learnt] = {}
        self._routers: dict[bytes, bool] = {}  # that have said hello; whether they change roles
        self.planner = ""
        self._changes_to: Role | None = None
        self._is_leaving = False
        self.duties: dict[Role, D] = {}
        self._take_duty(home.role)

    # ------------------------------------------------------------ its lives

    def start(self, *, ready: bool = False) -> None:
        """Start a process that is ready in its home role after the pool's `start_s`, or at once."""
        self.exists, self._began_at = True, self.world.clock.now
        epoch = self.duty.epoch = self.world.new_epoch()
        self.world.clock.after(0.0 if ready else self.home.start_s, lambda: self._become_ready(epoch))

    def _become_ready(self, epoch: int) -> None:
        """The process that was started as `epoch` serves from now on, unless it died meanwhile."""
        if not self.exists or epoch != self.duty.epoch:
            return
        self.duty.begin(epoch)
        for router in self.world.routers.values():
            router.on_up(self.address)

    def die(self, *, said: bool, back_s: float = 0.0) -> None:
        """The process ends. `said`: connections break; else messages to it are lost, and its routers only miss it."""
        if not self.exists:
            return
        self.world.stir(self.address)
        self._past_up_s = self.up_s
        self.exists, self._is_leaving, self._changes_to = False, False, None
        self._learnt.clear()
        self._routers.clear()
        self.planner = ""
        self.duty.end(said=said)
        reachable = self.duty.reachable
        self._take_duty(self.home.role)
        self.duty.reachable = reachable
        if said:
            self.world.soon(self._cut)
        if back_s:
            self.world.clock.after(back_s, self.start)

    def _cut(self) -> None:
        for router in list(self.world.routers.values()):
            router.on_cut(self.address)

    def stop(self) -> None:
        """Take no new requests, and end once the last one has ended. A change of role that still drains is given up."""
        if not self.duty.alive:
            self.die(said=True)
            return
        self._is_leaving = True
        self.duty.drain()

    @property
    def has_left(self) -> bool:
        """Whether it was to stop and may end: it has no requests, and every router knows that it takes no more."""
        duty = self.duty
        if not self._is_leaving or self._changes_to is not None or not duty.is_empty or duty.drains_since is None:
            return False
        return self.world.clock.now - duty.drains_since > 2 * self.world.scenario.heartbeat_s

    @property
    def up_s(self) -> float:
        """How long it was there so far, the time of its starts included."""
        return self._past_up_s + (self.world.clock.now - self._began_at if self.exists else 0.0)

    def slow_down(self, factor: float) -> None:
        """From now on, steps take `factor` times as long as the coefficients say, in whatever role."""
        self._factor = factor
        for duty in self.duties.values():
            duty.slow_down(factor)

    def learnt(self, role: Role) -> Learnt:
        """What this life of the process knows of its steps in a role."""
        return self._learnt.setdefault(role, Learnt())

    # ------------------------------------------------------------ routers

    def greet(self, router: bytes, hello: RouterHello) -> None:
        """A router has said hello."""
        self._routers[router] = hello.changes_roles
        self._name_planner()

    def lose(self, router: bytes) -> None:
        """A router is gone."""
        self._routers.pop(router, None)
        self._name_planner()

    def _name_planner(self) -> None:
        """The router that may change roles: of those that would, the one with the least id; "" if none would."""
        before = self.planner
        self.planner = min(
            (name.decode() for name, changes_roles in self._routers.items() if changes_roles), default=""
        )
        if self.planner != before:
            self.duty.changed()

    # ------------------------------------------------------------ roles

    def order(self, order: ChangeRole) -> None:
        """Begin to change the role, if the worker may and is not at it already."""
        duty = self.duty
        is_able = self.home.other_role is not None and duty.alive and duty.drains_since is None
        if not is_able or order.role == duty.role or self._changes_to is not None:
            return
        self._changes_to = order.role
        duty.drain()
        self._poll(duty.epoch, self.world.clock.now + ROLE_DRAIN_S)

    def _poll(self, epoch: int, until_s: float) -> None:
        """Change the role of the duty `epoch` once it is empty."""
        clock, role = self.world.clock, self._changes_to
        if role is None or epoch != self.duty.epoch:
            return
        if self._is_leaving:
            self._changes_to = None
        elif self.duty.is_empty:
            self.duty.close()
            clock.after(self.home.role_change_s, lambda: self._change(role, epoch))
        elif clock.now < until_s:
            clock.after(DRAIN_POLL_S, lambda: self._poll(epoch, until_s))
        else:
            self._changes_to = None
            self.duty.serve_again()

    def _change(self, role: Role, epoch: int) -> None:
        """Be of another role from now on, with an empty block pool and an epoch of its own."""
        if not self.exists or epoch != self.duty.epoch:
            return
        self._changes_to = None
        self.num_role_changes += 1
        self.duty.end(said=True)
        self._take_duty(role)
        self.duty.begin(self.world.new_epoch())
        self.world.stir(self.address)
        for router in self._routers:
            self.world.tell_router(router, self.address, (self.duty.hello(), self.duty.heartbeat(router)))
        if self._is_leaving:
            self.duty.drain()

    def _take_duty(self, role: Role) -> None:
        if role not in self.duties:
            self.duties[role] = self._begin(self, self.home.in_role(role))
            self.duties[role].slow_down(self._factor)
        self.duty = self.world.workers[self.address] = self.duties[role]
