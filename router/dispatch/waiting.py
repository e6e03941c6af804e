"""Requests that were admitted and are on no worker. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from router.dispatch.request_state import RequestState


class WaitingRequests:
    """The one queue of a router: new requests, and those that lost their workers. The oldest entry comes first."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}

    def add(self, state: RequestState, now: float) -> None:
        """Append a request; it has waited since `now`."""
        state.queued_at = now
        self._states[state.request.request_id] = state

    def discard(self, state: RequestState) -> None:
        """The request was placed, or is over. Does nothing for one that does not wait."""
        self._states.pop(state.request.request_id, None)

    def __contains__(self, state: object) -> bool:
        return isinstance(state, RequestState) and state.request.request_id in self._states

    def __iter__(self) -> Iterator[RequestState]:
        """In the order in which places are given; over a copy, so requests may come and go meanwhile."""
        return iter(list(self._states.values()))

    def __len__(self) -> int:
        return len(self._states)
