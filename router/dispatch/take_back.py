"""Prompts that a slow worker has not begun, which would be computed much sooner elsewhere. Pure.

The router knows no order inside a worker: a prompt counts as not begun while those that were placed there before it
take long. A wrong move costs what was computed of it, so a gain must be large, and each prompt is taken back rarely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.dispatch.request_state import RequestState, Stage
from router.dispatch.waits import waits_of
from router.fleet import Worker

LEAST_WAIT_S = 1.0
"""A prompt whose turn comes sooner stays: to move it costs messages, and it may have begun."""
LEAST_AGE_S = 0.5
"""A prompt that was placed so recently stays: its worker has not reported on it."""
GAIN = 0.5
"""Elsewhere a prompt must take at most this share of the time that it takes here."""
MAX_MOVES = 2
"""How often one prompt is taken back at most."""


def overdue(
    states: Iterable[RequestState], workers: Mapping[str, Worker], now: float
) -> list[tuple[RequestState, float]]:
    """Prompts on prefill workers that wait long, with the seconds until their first tokens there; the longest first.

    By how much a first token is late already, it will be late again.
    """
    found = []
    for state, later_s in waits_of(states, workers):
        if not may_move(state, now):
            continue
        waited_s = now - state.progress_at
        late_s = max(0.0, waited_s - state.expected_s) if state.expected_s > 0 else 0.0
        if later_s + late_s > LEAST_WAIT_S:
            found.append((state, later_s + late_s + state.forecast.prompt_s))
    return sorted(found, key=lambda one: -one[1])


def may_move(state: RequestState, now: float) -> bool:
    """Whether nothing has come of a prompt on a prefill worker, and it was not moved often or just now."""
    return (
        not state.done
        and state.prefill is not None
        and state.stage is Stage.PREFILL
        and not state.stream.token_ids
        and state.num_taken_back < MAX_MOVES
        and now - state.progress_at > LEAST_AGE_S
    )


def is_worth(here_s: float, there_s: float) -> bool:
    """Whether a prompt should move."""
    return there_s < GAIN * here_s and here_s - there_s > LEAST_WAIT_S
