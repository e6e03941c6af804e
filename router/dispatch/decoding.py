"""Which answers are being decoded, and where. Events keep it up to date, so that no tick looks at all of them. Pure.

add ─> open ── look: tokens of its decode worker come ─> decoded ── it moves ─> open
                                                            └────── it ends ─> gone
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from router.dispatch.request_state import RequestState


class Decoding:
    """The requests of a router in two parts: those that a worker decodes, and the `open` ones, which are few."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[str, tuple[int, RequestState]] = {}
        self._number_of: dict[str, int] = {}
        self._begun: dict[str, dict[str, float]] = {}  # by address of a decode worker, by id
        self._address_of: dict[str, str] = {}

    def add(self, state: RequestState) -> None:
        """A new request, until it is discarded."""
        request_id = state.request.request_id
        number = self._number_of[request_id] = next(self._numbers)
        self._open[request_id] = (number, state)
        state.on_move = self._reopen

    def discard(self, state: RequestState) -> None:
        """The request is over."""
        request_id = state.request.request_id
        self._number_of.pop(request_id, None)
        self._open.pop(request_id, None)
        self._forget(request_id)

    def look(self) -> None:
        """Count the open requests that are decoded by now as such; before the two questions below."""
        for _, state in list(self._open.values()):
            if (decode := state.decoded_on) is not None:
                request_id = state.request.request_id
                del self._open[request_id]
                self._begun.setdefault(decode.address, {})[request_id] = decode.delivered_at
                self._address_of[request_id] = decode.address

    @property
    def open(self) -> list[RequestState]:
        """Requests that were not being decoded at the last look or have moved since, in the order of their coming."""
        return [state for _, state in sorted(self._open.values(), key=_number)]

    @property
    def begun(self) -> Mapping[str, Mapping[str, float]]:
        """When the worker's first token came of each answer that it decodes, by its address and the request's id."""
        return self._begun

    # ------------------------------------------------------------ inside

    def _reopen(self, state: RequestState) -> None:
        """It changed workers."""
        request_id = state.request.request_id
        number = self._number_of.get(request_id)
        if number is not None and request_id not in self._open:
            self._forget(request_id)
            self._open[request_id] = (number, state)

    def _forget(self, request_id: str) -> None:
        address = self._address_of.pop(request_id, None)
        if address is not None:
            begun = self._begun[address]
            del begun[request_id]
            if not begun:
                del self._begun[address]


def _number(one: tuple[int, RequestState]) -> int:
    return one[0]
