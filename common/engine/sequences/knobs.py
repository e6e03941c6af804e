"""Tells of the knobs that a worker turns by itself: their values and reasons, in metrics and log."""

from __future__ import annotations

import logging

from common.engine.sequences.step_budget import Knob
from common.engine.worker import WorkerMetrics

log = logging.getLogger(__name__)
LOG_INTERVAL_S = 10.0
"""How often the log tells of one knob at most: it may turn at every step."""
NOTABLE = 0.25
"""A change of value by this share is logged; one of its reason always."""


class KnobLog:
    """Called by the engine's thread."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._known: dict[str, Knob] = {}
        self._logged: dict[str, tuple[Knob, float]] = {}

    def note(self, name: str, knob: Knob, now: float) -> None:
        """Note where the knob `name` stands at `now`, in seconds of a monotonic clock."""
        known = self._known.get(name)
        if knob == known:
            return
        self._known[name] = knob
        self._metrics.set_knob(name, knob.value, knob.reason, is_new_reason=not known or known.reason != knob.reason)
        if known is None:
            self._logged[name] = knob, -LOG_INTERVAL_S
            return
        before, logged_at = self._logged[name]
        is_notable = knob.reason != before.reason or abs(knob.value - before.value) >= NOTABLE * before.value
        if is_notable and now - logged_at >= LOG_INTERVAL_S:
            self._logged[name] = knob, now
            log.info(
                "%s: %d (%s), before %d (%s)", name, knob.value, knob.reason, before.value, before.reason,
                extra={"knob": name, "value": knob.value, "reason": knob.reason},
            )  # fmt: skip
