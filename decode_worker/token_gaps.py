"""Measures the gaps between the tokens of running sequences, for the goal that steps are planned by. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from common.engine.sequences import TokenGoal
from decode_worker.sequence import DecodeSequence


class TokenGaps:
    """A gap lies between two steps that have a sequence in common."""

    def __init__(self, goal: TokenGoal) -> None:
        self._goal, self._at = goal, 0.0
        self._sequences: set[DecodeSequence] = set()

    def stepped(
        self, sequences: Iterable[DecodeSequence], now: float, *, predicted_s: float, tokens_each: float
    ) -> None:
        """The tokens of a step came at `now`: `tokens_each` on average for each of these sequences that decode."""
        if not self._goal.is_set:
            return
        before, self._sequences = self._sequences, set(sequences)
        if not before.isdisjoint(self._sequences):
            self._goal.observe((now - self._at) / max(1.0, tokens_each), predicted_s)
        self._at = now
