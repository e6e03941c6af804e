"""How long workers take from being asked for to being ready, by role, as this router has seen. Pure: `now` comes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from common.wire import ROLES, Role

NUM_REMEMBERED = 8
"""Starts of a role. The longest of them is expected of the next one."""
LONGEST_S = 3600.0
"""A worker that is not ready after so long is not starting."""


class StartTimes:
    """Every growth of what is wanted begins starts; every growth of what is ready ends the oldest of them."""

    def __init__(self, assumed_s: float) -> None:
        self._assumed_s = assumed_s
        self._begun: dict[Role, deque[float]] = {role: deque() for role in ROLES}
        self._took: dict[Role, deque[float]] = {role: deque(maxlen=NUM_REMEMBERED) for role in ROLES}
        self._ready: dict[Role, int] = {}
        self._wanted: dict[Role, int] = {}

    def observe(self, role: Role, wanted: int, ready: int, now: float) -> None:
        """So many workers are wanted and so many ready."""
        begun = self._begun[role]
        for _ in range(max(0, ready - self._ready.get(role, ready))):
            if begun:
                self._took[role].append(now - begun.popleft())
        begun.extend([now] * max(0, wanted - self._wanted.get(role, max(wanted, ready))))
        while len(begun) > max(0, wanted - ready):
            begun.pop()  # no longer wanted
        while begun and begun[0] < now - LONGEST_S:
            begun.popleft()
        self._ready[role], self._wanted[role] = ready, wanted

    def seconds(self) -> Mapping[Role, float]:
        """The longest of the latest starts; what is assumed before the first."""
        return {role: max(took, default=self._assumed_s) for role, took in self._took.items()}
