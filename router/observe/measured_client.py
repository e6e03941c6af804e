"""A generation client that measures the attainment of latency goals and the offered load."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import msgspec

from common.config import DEFAULT
from common.errors import Overloaded, RequestError
from router.dispatch import ANYONE, Caller, Dispatcher, DispatchLoad, GenerationRequest, TokenEvent
from router.observe.slo import SLOWindow
from router.planner import LoadWindow, SampledRequest


class MeasuredClient:
    """Wraps the dispatcher. Records the latencies of streams in a `SLOWindow`, and requests in a `LoadWindow`.

    Later steps of an answer, as of a beam search, have no goal for a first token. They are load like other requests.
    """

    def __init__(
        self,
        client: Dispatcher,
        window: SLOWindow,
        clock: Callable[[], float] = time.monotonic,
        load: LoadWindow | None = None,
    ) -> None:
        self._client, self._window, self._clock = client, window, clock
        self._load = LoadWindow() if load is None else load

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Generate tokens; see `GenerationClient.generate`."""
        began, first, last, num_tokens, num_cached = self._clock(), 0.0, 0.0, 0, 0
        failed = refused = False
        name, window = request.request_class, self._window
        self._load.arrived(began)
        sink = request.sink

        def passed_on(event: TokenEvent) -> bool:
            nonlocal last, num_tokens
            if sink is None or not num_tokens or not sink(event):
                return False
            last, num_tokens = self._clock(), num_tokens + len(event.token_ids)
            return True

        stream = self._client.generate(request if sink is None else msgspec.structs.replace(request, sink=passed_on))
        try:
            async for event in stream:
                now, count = self._clock(), len(event.token_ids) or int(bool(event.pooled))
                if not num_tokens and count:
                    first, num_cached = now, event.num_cached_tokens
                    if not request.continues:
                        window.first_token(now - began, now, name)
                        self._load.first_token(now - began, now)
                last, num_tokens = now, num_tokens + count
                yield event
        except RequestError as error:
            refused = isinstance(error, Overloaded)
            failed = error.status >= 500 or refused
            raise
        finally:
            now = self._clock()
            had_first_token = request.continues or num_tokens > 0
            if failed or (not had_first_token and now - began > window.ttft_s(name)):
                window.failed(had_first_token, now, name)
            elif num_tokens > 1:
                token_s = (last - first) / (num_tokens - 1)
                window.finished(token_s, now, name)
                self._load.token_time(token_s, now)
            if num_tokens:
                self._load.ended(SampledRequest(len(request.prompt_token_ids), num_cached, num_tokens), now)
            elif refused:
                self._load.refused(len(request.prompt_token_ids), now)
            await stream.aclose()

    def check_room(self, is_longer: Callable[[int], bool], caller: Caller = ANYONE) -> None:
        """Check for capacity; see `GenerationClient.check_room`. A rejection counts as a missed goal, and as load."""
        try:
            self._client.check_room(is_longer, caller)
        except RequestError:
            now = self._clock()
            self._window.failed(False, now, caller.classes[0].name if caller.classes else DEFAULT)
            self._load.arrived(now)
            raise

    @property
    def ready(self) -> tuple[bool, str]:
        return self._client.ready

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    def reset_prefix_cache(self) -> None:
        self._client.reset_prefix_cache()

    def passed_on(self) -> None:
        self._client.passed_on()

    def load(self) -> DispatchLoad:
        load, attained = self._client.load(), self._window.class_attainment(self._clock())
        classes = tuple(replace(one, attainment=attained.get(one.name, {})) for one in load.classes)
        return replace(load, classes=classes)
