"""`GenerationClient` over ZeroMQ: executes the actions of `DispatchCore` on one event loop.

Feeds messages, ticks and the time to the core, runs its timers, and wakes the consumers of streams. Each wait for an
event is bounded by the request's deadline, whose timer fails the request.
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
from router.dispatch.request_scheduler import Cancel
from router.dispatch.serving_orders import ServingOrders
from router.fleet import CONTROL_HWM, WorkerFleet
from router.policy import SplitForecaster

PASSED_ON_S = 60.0
"""Seconds during which a request that was sent to another model still counts as demand. Autoscalers poll a few times a
minute."""


class Dispatcher:
    """Serves token streams from the worker pools.

    Not thread-safe: one event loop calls `start`, serves, and `close`.
    """

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
        """Create a dispatcher.

        `splits` forecasts the effect of role changes. `models`: see `WorkerFleet`. Requests need a ready worker of the
        role `needed`: "prefill" for models that generate no text. `has_prefill=False` means that the model has no
        prefill workers by design.
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
        self.serving = ServingOrders(self.fleet, self.on_abort_all)
        actions = Actions(self.fleet.send, self.fleet.abort, self._later, self._wake)
        self.core = DispatchCore(config, self.fleet.registry, self.fleet.index, actions, None, splits, has_prefill)

    # ------------------------------------------------------------ for the API layer

    async def start(self) -> None:
        """Start connecting to the workers and return. Requests are queued until workers are ready."""
        await self.fleet.start()
        self._open = True

    async def close(self) -> None:
        """Fail all requests, abort them on the workers, and close all sockets. Takes well under a second."""
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
                event = state.take_event()  # raises the request's error after the last event
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
        """Whether requests would be served now, and what is missing. Workers of the needed role suffice."""
        if not self._open:
            return False, "the router is not connected to its workers"
        if self.fleet.failure:
            return False, self.fleet.failure
        if self.serving.is_asleep:
            return False, "the workers are asleep: POST /wake_up"
        if self.serving.is_paused:
            return False, "the model is paused: POST /resume"
        registry, now = self.fleet.registry, self._clock()
        if missing := registry.missing(self._needed, now):
            return False, missing
        if missing := self.fleet.missing_answers(now):
            return False, missing
        if self._needed == "prefill":
            return True, ""
        alone = registry.missing("prefill", now) if self.core.has_prefill else ""
        return True, alone or self.fleet.pairing.note

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length over all ready workers, or the last known one; 0 before the first."""
        self._last_max_model_len = self.fleet.registry.max_model_len() or self._last_max_model_len
        return self._last_max_model_len

    def reset_prefix_cache(self) -> None:
        """Clear the prefix caches of all workers, and the prefix index."""
        self.core.forget_prefixes()
        for address in self.fleet.connections:
            self.fleet.send(address, ResetPrefixCache(request_id="reset"))

    def load(self) -> DispatchLoad:
        """Return a snapshot of requests and workers."""
        core = self.core
        return DispatchLoad.of(
            core.states.values(), self.fleet, core.counters, self._classes, core.wait_limits_s, self._clock()
        )

    def demand(self, slo_s: float) -> Demand:
        """Return the load that autoscalers read; see `DemandMeter.measure`."""
        demand = self.core.demand(slo_s, self._clock())
        if self._clock() - self._passed_on_at > PASSED_ON_S or self.fleet.registry.ready("decode"):
            return demand
        return replace(demand, held={**demand.held, "decode": demand.held["decode"] + 1})

    def passed_on(self) -> None:
        """See `ServingClient.passed_on`. Counts as one queued request while there is no decode worker."""
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

    def on_abort_all(self) -> None:
        self.core.abort_all(self._clock())

    def on_tick(self, now: float) -> None:
        self.core.on_tick(now)

    def uses(self, address: str) -> bool:
        return self.core.uses(address)

    # ------------------------------------------------------------ for the core

    def _later(self, delay_s: float, then: Callable[[float], None]) -> Cancel:
        loop = asyncio.get_running_loop()
        return loop.call_later(delay_s, lambda: then(self._clock())).cancel

    def _wake(self, request_id: str) -> None:
        """Pass the next event of a stream to its sink, or wake `generate`."""
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
        except Exception as error:  # a bug must end only this stream, not the processing of the worker's message
            wake.set_exception(error)

    def _check_open(self) -> None:
        if not self._open:
            raise Unavailable("The router is shutting down.", retry_after_s=RETRY_AFTER_S)
