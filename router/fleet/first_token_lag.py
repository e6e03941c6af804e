"""How much later than the models of steps say first tokens come, of prompts that wait for no other. Pure.

Messages, wake-ups, and the rest of a step that runs without prompts are in no model of steps: a few milliseconds where
processes have cores of their own, tens where nine of them share two. One average serves all workers of a role, so it
changes no choice between them.
"""

from __future__ import annotations

import math

from common.observe import Ewma

LEAST_S, MOST_S, LAG_SMOOTHING = 1e-4, 1.0, 0.05
"""Between which a lag is believed; the share of one more first token in the average."""


class FirstTokenLag:
    """`seconds` is the recent geometric mean, between `LEAST_S` and `MOST_S`; 0 before any first token.

    Of lags that are spread over decades, an arithmetic mean would say what the longest say.
    """

    def __init__(self) -> None:
        self._logs: Ewma | None = None

    @property
    def seconds(self) -> float:
        return math.exp(self._logs.value) if self._logs is not None else 0.0

    def observe(self, measured_s: float, predicted_s: float) -> None:
        """A first token came after `measured_s`, by the model of steps `predicted_s`."""
        if self._logs is None:
            self._logs = Ewma(LAG_SMOOTHING)
        self._logs.observe(math.log(min(MOST_S, max(LEAST_S, measured_s - predicted_s))))
