"""The `GenerationClient` over ZeroMQ: it carries out what `DispatchCore` decides, on one event loop.

It gives the core messages, ticks and the time, keeps its timers, and lets the consumer of each stream wait for its next
event. The request's deadline bounds that wait: its timer fails the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import replace

from common.config import RouterConfig
from common.errors import RETRY_AFTER_S, Unavailable
from common.wire import Role
from common.wire.messages import PromptResult, RequestFailed, ResetPrefixCache, TokenOutput
from router.dispatch.adapter_orders import AdapterOrders
from router.dispatch.client import ANYONE, Caller, GenerationRequest, TokenEvent
from router.dispatch.core import Actions, DispatchCore
from router.dispatch.load import Demand, DispatchLoad
from router.dispatch.turns import Cancel
from router.fleet import CONTROL_HWM, WorkerFleet
from router.policy import SplitForecaster

PASSED_ON_S = 60.0
"""How long a request that went to another model counts as held here: autoscalers look a few times a minute."""


class Dispatcher:
    """Serves token streams from the pools. Owned by one event loop: `start`, serve, `close`."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        hwm: int = CONTROL_HWM,
        splits: SplitForecaster | None = None,
        needed: Role = "decode",
        models: Collection[str] = (),
        has_prefill: bool = True,
    ) -> None:
        """`splits` predicts for changes of roles. `models`: see the fleet.

        Nothing is served without a worker of the role that is `needed`: prefill for a model that generates no text.
        Without `has_prefill` the model has no prefill workers, and none is missed, whatever discovery could find.
        """
        self._clock = time.monotonic
        self._wakes: dict[str, asyncio.Future[TokenEvent | None]] = {}
        self._last_max_model_len = 0
        self._open = False
        self._needed = needed
        self._passed_on_at = -PASSED_ON_S
        self._classes = config.classes
        self.fleet = WorkerFleet(config, self, hwm=hwm, clock=self._clock, models=models)
        self.adapters = AdapterOrders(self.fleet)
        actions = Actions(self.fleet.send, self.fleet.abort, self._later, self._wake)
        self.core = DispatchCore(config, self.fleet.registry, self.fleet.index, actions, None, splits, has_prefill)

    # ------------------------------------------------------------ for the front

    async def start(self) -> None:
        """Connect to the workers; returns at once. Requests wait until workers are ready."""
        await self.fleet.start()
        self._open = True

    async def close(self) -> None:
        """Fail all requests, abort them on the workers, close every socket. Takes well under a second."""
        self._open = False
        self.core.close()
        await self.fleet.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `GenerationClient.generate`."""
        self._check_open()
        state = self.core.submit(request, self._clock())
        loop, request_id = asyncio.get_running_loop(), request.request_id
        try:
            while True:
                event = state.take_event()  # raises the request's error behind the last event
                while event is None:
                    wake = self._wakes[request_id] = loop.create_future()
                    event = await wake or state.take_event()
                yield event
                if event.finish_reason:
                    return
        finally:
            self._wakes.pop(request_id, None)
            self.core.end(state)

    def check_room(self, is_longer: Callable[[int], bool], caller: Caller = ANYONE) -> None:
        """See `GenerationClient.check_room`."""
        self._check_open()
        self.core.check_room(is_longer, self._clock(), caller)

    @property
    def ready(self) -> tuple[bool, str]:
        """Whether a request would be served now, and what is missing: workers of the needed role are enough."""
        if not self._open:
            return False, "the router is not connected to its workers"
        if self.fleet.failure:
            return False, self.fleet.failure
        registry, now = self.fleet.registry, self._clock()
        if missing := registry.missing(self._needed, now):
            return False, missing
        if self._needed == "prefill":
            return True, ""
        alone = registry.missing("prefill", now) if self.core.has_prefill else ""
        return True, alone or self.fleet.pairing.note

    @property
    def max_model_len(self) -> int:
        """The longest sequence that all ready workers take, or took when some were last ready; 0 before."""
        self._last_max_model_len = self.fleet.registry.max_model_len() or self._last_max_model_len
        return self._last_max_model_len

    def reset_prefix_cache(self) -> None:
        """Have every worker empty its prefix cache, and clear the prefix index."""
        self.core.forget_prefixes()
        for address in self.fleet.connections:
            self.fleet.send(address, ResetPrefixCache(request_id="reset"))

    def load(self) -> DispatchLoad:
        """Where requests are and how the workers are, in numbers."""
        core = self.core
        return DispatchLoad.of(
            core.states.values(), self.fleet, core.counters, self._classes, core.wait_limits_s, self._clock()
        )

    def demand(self, slo_s: float) -> Demand:
        """The load that autoscalers read; see `DemandMeter.measure`."""
        demand = self.core.demand(slo_s)
        if self._clock() - self._passed_on_at > PASSED_ON_S or self.fleet.registry.ready("decode"):
            return demand
        return replace(demand, held={**demand.held, "decode": demand.held["decode"] + 1})

    def passed_on(self) -> None:
        """See `ServingClient.passed_on`. Without a decode worker it counts as a request that is held for one."""
        self._passed_on_at = self._clock()

    # ------------------------------------------------------------ for the fleet

    def on_output(self, address: str, output: TokenOutput) -> None:
        self.core.on_output(address, output, self._clock())

    def on_prompt_result(self, address: str, result: PromptResult) -> None:
        self.core.on_prompt_result(address, result, self._clock())

    def on_failed(self, address: str, failed: RequestFailed) -> None:
        self.core.on_failed(address, failed, self._clock())

    def on_lost(self, address: str, reason: str) -> None:
        self.core.on_lost(address, reason, self._clock())

    def on_ready(self, address: str) -> None:
        self.core.on_ready(address, self._clock())

    def on_tick(self, now: float) -> None:
        self.core.on_tick(now)

    def uses(self, address: str) -> bool:
        return self.core.uses(address)

    # ------------------------------------------------------------ for the core

    def _later(self, delay_s: float, then: Callable[[float], None]) -> Cancel:
        loop = asyncio.get_running_loop()
        return loop.call_later(delay_s, lambda: then(self._clock())).cancel

    def _wake(self, request_id: str) -> None:
        """Pass what is new of a stream to its sink, or wake `generate`, which waits, for it."""
        wake = self._wakes.get(request_id)
        if wake is None or wake.done():
            return
        state = self.core.states.get(request_id)
        if state is None or state.done or state.stream.finish_reason or (sink := state.request.sink) is None:
            wake.set_result(None)
            return
        try:
            event = state.take_event()
            if event is None or not sink(event):
                wake.set_result(event)
        except Exception as error:  # a bug ends the answer, not what its worker sent to others
            wake.set_exception(error)

    def _check_open(self) -> None:
        if not self._open:
            raise Unavailable("the router is shutting down", retry_after_s=RETRY_AFTER_S)
