"""Recent attainment of the router's latency goals. Pure: takes `now`.

`ttft` is the time from a request's arrival at the dispatcher to its first token, `tpot` the mean time per later token.
A sequence that failed, or was rejected for lack of capacity, misses `ttft`, or `tpot` after its first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.config import DEFAULT, RequestClass
from common.observe import SlidingWindow

GOALS_WINDOW_S, NUM_SLOTS = 60.0, 12
"""Window of attainment in seconds, and its number of slots."""


@dataclass(slots=True)
class _Slot:
    num_kept: int = 0
    num_total: int = 0


class RecentShare:
    """Share of the sequences in the last `window_s` seconds that met a goal."""

    def __init__(self, window_s: float = GOALS_WINDOW_S) -> None:
        self._window = SlidingWindow(window_s, NUM_SLOTS, _Slot)

    def add(self, kept: bool, now: float) -> None:
        slot = self._window.current(now)
        slot.num_kept += kept
        slot.num_total += 1

    def value(self, now: float) -> float:
        """Return the share, 0 to 1; 1 without sequences."""
        slots = self._window.recent(now)
        total = sum(slot.num_total for slot in slots)
        return sum(slot.num_kept for slot in slots) / total if total else 1.0


@dataclass(slots=True)
class _GoalShares:
    """Attainment of the goals of one class."""

    request_class: RequestClass
    ttft: RecentShare
    tpot: RecentShare

    def shares(self, now: float) -> dict[str, float]:
        """Return the share for each goal that the class has."""
        one = self.request_class
        goals = (("ttft", one.ttft_s, self.ttft), ("tpot", one.tpot_s, self.tpot))
        return {name: share.value(now) for name, goal_s, share in goals if goal_s > 0}


class SLOWindow:
    """Goals of each request class, and their attainment.

    `ttft_s` and `tpot_s` are the goals of the class `default` in seconds, 0 for none. `others` are further classes. A
    sequence counts towards the goals of its class. The attribute `tpot_s` is the tightest TPOT goal.
    """

    def __init__(
        self, ttft_s: float, tpot_s: float, window_s: float = GOALS_WINDOW_S, others: Iterable[RequestClass] = ()
    ) -> None:
        classes = (RequestClass(ttft_s=ttft_s, tpot_s=tpot_s), *others)
        self._shares = {one.name: _GoalShares(one, RecentShare(window_s), RecentShare(window_s)) for one in classes}
        self.tpot_s = min((one.tpot_s for one in classes if one.tpot_s > 0), default=0.0)
        any_ttft_s = max(one.ttft_s for one in classes)
        self._all = _GoalShares(
            RequestClass("all", any_ttft_s, self.tpot_s), RecentShare(window_s), RecentShare(window_s)
        )

    @classmethod
    def of(cls, classes: Mapping[str, RequestClass]) -> SLOWindow:
        """Create a window for all classes of a router."""
        default = classes[DEFAULT]
        return cls(default.ttft_s, default.tpot_s, others=[one for one in classes.values() if one is not default])

    @property
    def has_goals(self) -> bool:
        return self._all.request_class.has_goals

    def ttft_s(self, name: str = DEFAULT) -> float:
        """Return the TTFT goal of a class, in seconds."""
        return self._of(name).request_class.ttft_s

    def first_token(self, ttft_s: float, now: float, name: str = DEFAULT) -> None:
        """Record a first token."""
        self._add_ttft(name, ttft_s <= self.ttft_s(name), now)

    def finished(self, tpot_s: float, now: float, name: str = DEFAULT) -> None:
        """Record the successful end of a sequence."""
        self._add_tpot(name, tpot_s <= self._of(name).request_class.tpot_s, now)

    def failed(self, had_first_token: bool, now: float, name: str = DEFAULT) -> None:
        """Record a failed or rejected sequence."""
        (self._add_tpot if had_first_token else self._add_ttft)(name, False, now)

    def attainment(self, now: float) -> dict[str, float]:
        """Return the share of sequences, of all classes with the goal, that met each goal."""
        return self._all.shares(now)

    def class_attainment(self, now: float) -> dict[str, dict[str, float]]:
        """Return the attainment of each class."""
        return {name: kept.shares(now) for name, kept in self._shares.items()}

    def _of(self, name: str) -> _GoalShares:
        return self._shares.get(name) or self._shares[DEFAULT]

    def _add_ttft(self, name: str, kept: bool, now: float) -> None:
        if (mine := self._of(name)).request_class.ttft_s > 0:
            mine.ttft.add(kept, now)
            self._all.ttft.add(kept, now)

    def _add_tpot(self, name: str, kept: bool, now: float) -> None:
        if (mine := self._of(name)).request_class.tpot_s > 0:
            mine.tpot.add(kept, now)
            self._all.tpot.add(kept, now)
