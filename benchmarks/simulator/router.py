"""A router in virtual time: production's dispatch core, registry and lives, without sockets and HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.simulator.world.load import SimulatedRequest
from benchmarks.simulator.world.world import World
from common.config import RouterConfig
from common.errors import RequestError
from common.wire.message_fields import ROLES
from common.wire.messages import (
    AbortRequest,
    Message,
    PromptResult,
    RequestFailed,
    RouterHello,
    TokenOutput,
    ToRouter,
    WorkerHeartbeat,
)
from router.dispatch.core import Actions, DispatchCore
from router.dispatch.request_scheduler import Cancel
from router.dispatch.request_state import RequestState
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.worker_monitor import WorkerMonitor
from router.planner.split import SizingForecaster
from router.policy import Policy

CUT_BEATS = 2
"""A worker that could not send a router so many heartbeats in a row takes it for lost, as in life."""
CONNECTION_LOST = "ConnectionLost"
"""The outcome of requests whose router died."""


class SimulatedRouter:
    """See `Dispatcher` and `WorkerFleet`. It calls `on_over` with each request that has ended. It is `alive` once.

    `quiet` workers would say the same in their next heartbeats: all that would change is when they were last seen.
    """

    def __init__(
        self,
        world: World,
        name: bytes,
        config: RouterConfig,
        policy: Policy,
        on_over: Callable[[SimulatedRequest], None],
    ) -> None:
        self.world, self.name, self._on_over = world, name, on_over
        self.registry = WorkerRegistry(
            config.prefill, config.decode, worker_timeout_s=config.worker_timeout_s, router_id=name.decode()
        )
        self.index = PrefixIndex()
        actions = Actions(self._send, self._abort, self._later, self._wake)
        self.core = DispatchCore(config, self.registry, self.index, actions, policy, SizingForecaster.of(config))
        self._lives = WorkerMonitor(self.registry, self.index, self, self.on_up, self._send)
        self._hello = RouterHello(router_id=name.decode(), epoch=1, changes_roles=config.role_change)
        self._config = config
        self._woken: list[str] = []
        self.quiet: set[str] = set()
        self._served: dict[str, tuple[SimulatedRequest, RequestState]] = {}
        self.alive = True

    def die(self) -> None:
        """The process ends: its clients lose their connections, and workers notice some heartbeats later."""
        self.alive = False
        del self.world.routers[self.name]
        lost, self._served = self._served, {}
        for request, _ in lost.values():
            self._lost(request)
        self.world.clock.after(CUT_BEATS * self.world.scenario.heartbeat_s, self._is_missed)

    def _is_missed(self) -> None:
        for worker in self.world.workers.values():
            worker.lose_router(self.name)

    def _lost(self, request: SimulatedRequest) -> None:
        """A client's connection to the router breaks."""
        request.outcome, request.ended_at = CONNECTION_LOST, self._now
        self._on_over(request)

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served now."""
        return bool(self.registry.ready("decode"))

    # ------------------------------------------------------------ clients

    def ask(self, request: SimulatedRequest) -> None:
        """A client sends a request."""
        if not self.alive:  # it was on its way
            self._lost(request)
            return
        scenario = self.world.scenario
        ttft_s, tpot_s = self._config.slo_ttft_ms / 1000, self._config.slo_tpot_ms / 1000
        asked = request.ask(scenario.load.max_tokens, ttft_s, self._config.request_timeout_s, tpot_s)
        try:
            state = self.core.submit(asked, self._now)
        except RequestError as error:
            request.outcome, request.ended_at = type(error).__name__, self._now
            self._on_over(request)
            return
        self._served[request.request_id] = (request, state)
        self._serve_woken()

    def _serve_woken(self) -> None:
        """Let the clients read whose requests have something new."""
        while self._woken:
            woken, self._woken = self._woken, []
            for request_id in woken:
                if request_id in self._served:
                    self._read(*self._served[request_id])

    def _read(self, request: SimulatedRequest, state: RequestState) -> None:
        try:
            event = state.take_event()
        except RequestError as error:
            self._over(request, state, type(error).__name__)
            return
        if event is None:
            return
        if not request.num_tokens and event.token_ids:
            request.first_token_at = self._now
        request.num_tokens += len(event.token_ids)
        request.num_cached = event.num_cached_tokens
        if event.finish_reason:
            self._over(request, state, "ok")

    def _over(self, request: SimulatedRequest, state: RequestState, outcome: str) -> None:
        request.outcome, request.ended_at = outcome, self._now
        del self._served[request.request_id]
        self.core.end(state)
        self._on_over(request)

    # ------------------------------------------------------------ workers

    def hear(self, address: str, message: ToRouter) -> None:
        """A message of a worker has arrived."""
        if not self.alive:
            return
        self._lives.on_message(address, message, self._now)
        self._serve_woken()

    def hear_beats(self, beats: Sequence[tuple[str, WorkerHeartbeat]]) -> None:
        """Heartbeats of workers have arrived, by address."""
        if not self.alive:
            return
        now, workers = self._now, self.registry.workers
        for address, beat in beats:
            self._lives.on_message(address, beat, now)
            if workers[address].ready and self.world.workers[address].still_says(self.name, beat):
                self.quiet.add(address)
        self._serve_woken()

    def on_up(self, address: str) -> None:
        """The connection to a worker has come up, or the worker is to say who it is."""
        self.world.tell_worker(self.name, address, self._hello)

    def on_cut(self, address: str) -> None:
        """The connection to a worker broke."""
        self._lives.on_cut(address, self._now)
        self._serve_woken()

    def tick(self) -> None:
        """A heartbeat interval has passed."""
        now, workers = self._now, self.registry.workers
        for address in self.quiet:
            workers[address].life.last_seen = now
        self._lives.sweep(now)
        self.index.expire(self._now)
        if sum(len(self.registry.ready(role)) for role in ROLES) < len(self.registry.workers):
            for address in self.registry.workers:
                if self.registry.needs_hello(address):
                    self.on_up(address)
        self.core.on_tick(self._now)
        self._serve_woken()

    # ------------------------------------------------------------ news of workers, see FleetListener

    def on_output(self, address: str, output: TokenOutput) -> None:
        self.core.on_output(address, output, self._now)

    def on_prompt_result(self, address: str, result: PromptResult) -> None:
        self.core.on_prompt_result(address, result, self._now)

    def on_failed(self, address: str, failed: RequestFailed) -> None:
        self.core.on_failed(address, failed, self._now)

    def on_lost(self, address: str, reason: str) -> None:
        self.core.on_lost(address, reason, self._now)

    def on_ready(self, address: str) -> None:
        self.core.on_ready(address, self._now)

    def on_abort_all(self) -> None:
        self.core.abort_all(self._now)

    def on_tick(self, now: float) -> None:
        self.core.on_tick(now)

    def uses(self, address: str) -> bool:
        return self.core.uses(address)

    # ------------------------------------------------------------ actions of the core

    @property
    def _now(self) -> float:
        return self.world.clock.now

    def _send(self, address: str, message: Message) -> bool:
        self.quiet.discard(address)
        return self.world.tell_worker(self.name, address, message)

    def _abort(self, address: str, request_id: str, attempt: int) -> None:
        self._send(address, AbortRequest(request_id=request_id, attempt=attempt))

    def _later(self, delay_s: float, then: Callable[[float], None]) -> Cancel:
        def happen() -> None:
            if self.alive:
                then(self._now)
                self._serve_woken()

        return self.world.clock.after(delay_s, happen).cancel

    def _wake(self, request_id: str) -> None:
        self._woken.append(request_id)
