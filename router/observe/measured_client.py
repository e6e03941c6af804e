"""A client of the pools that measures how the service keeps its goals about time."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable

from common.errors import Overloaded, RequestError
from router.dispatch.client import GenerationRequest, TokenEvent
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.load import DispatchLoad
from router.observe.slo import SLOWindow


class MeasuredClient:
    """The dispatcher; the times of each stream go to a `SLOWindow`."""

    def __init__(self, client: Dispatcher, window: SLOWindow, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._window, self._clock = client, window, clock

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `GenerationClient.generate`."""
        began, first, last, num_tokens = self._clock(), 0.0, 0.0, 0
        failed = False
        stream = self._client.generate(request)
        try:
            async for event in stream:
                now, count = self._clock(), len(event.token_ids)
                if not num_tokens and count:
                    first = now
                    self._window.first_token(now - began, now)
                elif count:
                    self._window.gap((now - last) / count, now)
                last, num_tokens = now, num_tokens + count
                yield event
        except RequestError as error:
            failed = error.status >= 500 or isinstance(error, Overloaded)
            raise
        finally:
            now = self._clock()
            if failed or (not num_tokens and now - began > self._window.ttft_s):
                self._window.failed(num_tokens > 0, now)
            elif num_tokens > 1:
                self._window.finished((last - first) / (num_tokens - 1), now)
            await stream.aclose()

    def check_room(self, is_longer: Callable[[int], bool]) -> None:
        """See `GenerationClient.check_room`. A refused request got no first token in time."""
        try:
            self._client.check_room(is_longer)
        except RequestError:
            self._window.failed(False, self._clock())
            raise

    @property
    def ready(self) -> tuple[bool, str]:
        return self._client.ready

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    def reset_prefix_cache(self) -> None:
        self._client.reset_prefix_cache()

    def load(self) -> DispatchLoad:
        return self._client.load()
