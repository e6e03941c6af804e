"""How often, lately, this router kept its goals about time. Pure: `now` comes in.

`ttft` is the time from a request's arrival at the dispatcher to its first token, `tpot` the mean time of a later token.
A sequence that the service failed or refused for lack of room misses `ttft`, or `tpot` once it had a first token.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.observe.sliding_window import SlidingWindow

WINDOW_S, NUM_SLOTS = 60.0, 12


@dataclass(slots=True)
class _Slot:
    num_kept: int = 0
    num_total: int = 0


class RecentShare:
    """The share of sequences in the last `window_s` seconds that kept a goal."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window = SlidingWindow(window_s, NUM_SLOTS, _Slot)

    def add(self, kept: bool, now: float) -> None:
        slot = self._window.current(now)
        slot.num_kept += kept
        slot.num_total += 1

    def value(self, now: float) -> float:
        """0 to 1; 1 without any sequence."""
        slots = self._window.recent(now)
        total = sum(slot.num_total for slot in slots)
        return sum(slot.num_kept for slot in slots) / total if total else 1.0


class SLOWindow:
    """The two goals in seconds, 0 for none, and how they were kept."""

    def __init__(self, ttft_s: float, tpot_s: float, window_s: float = WINDOW_S) -> None:
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self._ttft, self._tpot = RecentShare(window_s), RecentShare(window_s)

    @property
    def has_goals(self) -> bool:
        return self.ttft_s > 0 or self.tpot_s > 0

    def first_token(self, ttft_s: float, now: float) -> None:
        """A first token came."""
        self._ttft.add(ttft_s <= self.ttft_s, now)

    def finished(self, tpot_s: float, now: float) -> None:
        """A sequence ended well."""
        self._tpot.add(tpot_s <= self.tpot_s, now)

    def failed(self, had_first_token: bool, now: float) -> None:
        """A sequence failed or was refused."""
        (self._tpot if had_first_token else self._ttft).add(False, now)

    def attainment(self, now: float) -> dict[str, float]:
        """The share of sequences that kept each goal, by its name."""
        goals = (("ttft", self.ttft_s, self._ttft), ("tpot", self.tpot_s, self._tpot))
        return {name: share.value(now) for name, goal_s, share in goals if goal_s > 0}
