"""How long tokens take, over what the models of steps predict for them, by the answers that have ended. Pure.

Accepted draft tokens make them quicker, a step of prompts on the same cores slower: neither is in a model of steps. One
average serves all decode workers, so it changes no choice between them, and none is avoided for a slow past.
"""

from __future__ import annotations

import math

from common.observe import Ewma

LEAST, MOST, PACE_SMOOTHING = 0.25, 2.0, 0.05
"""Between which a pace is believed; the share of one more answer in the average."""
MIN_TOKENS = 8
"""Answers of fewer tokens say little about the mean of one."""


class TokenPace:
    """`value` is the recent geometric mean, between `LEAST` and `MOST`; 1 before any answer."""

    def __init__(self) -> None:
        self._average = Ewma(PACE_SMOOTHING, start=0.0)

    @property
    def value(self) -> float:
        return min(MOST, max(LEAST, math.exp(self._average.value)))

    def observe(self, decode_s: float, num_tokens: int, predicted_s: float) -> None:
        """An answer has ended: its `num_tokens` later tokens took `decode_s`, by the model `predicted_s` each."""
        if num_tokens >= MIN_TOKENS and predicted_s > 0.0 and decode_s > 0.0:
            ratio = decode_s / num_tokens / predicted_s
            self._average.observe(math.log(min(MOST, max(LEAST, ratio))))
