"""When a prompt waits in the router although a worker would take it: once each worker has prompts for some steps. Pure.

In the router the order of prompts is open: one of higher priority, or of a key that got less, may still pass, and the
first worker that has room takes the next one. A worker that has a few steps of prompts is busy all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.config import RequestClass
from common.latency import StepShape
from router.dispatch.request_state import RequestState
from router.dispatch.waiting import WaitingRequests
from router.fleet import Worker, WorkerRegistry
from router.policy import Choice, model_of, place_s, queued_s, step_tokens

HOLD_STEPS, HOLD_S = 3, 0.1
"""A worker has enough with prompts for so many full steps, and so many seconds: that bridges the way of a message."""


def enough_s(worker: Worker) -> float:
    """Seconds of prompts with which a worker is surely busy until the router hears from it again."""
    full = StepShape.of_prompt(0, step_tokens(worker))
    return max(HOLD_S, HOLD_STEPS * model_of(worker).seconds(full))


class Holding:
    """Says which requests of `waiting` are held, and how long that takes."""

    def __init__(self, registry: WorkerRegistry, waiting: WaitingRequests) -> None:
        self._registry, self._waiting = registry, waiting

    @property
    def holds_any(self) -> bool:
        """Whether a request is held."""
        return self._waiting.num_held > 0

    def concerns(self, choice: Choice) -> bool:
        """Whether the choice needs the pool that computes prompts: those that need it not are never held."""
        return choice.prefill is not None or not self._registry.ready("prefill")

    def room_in_s(self, choice: Choice, priority: int, now: float) -> float:
        """Seconds until a worker like the chosen one has little to compute of at least `priority`; at most 0: now."""
        first = choice.prefill or choice.decode
        if first is None:
            return 0.0
        if not first.suspect and (span_s := _room_in_s(first, priority, now)) <= 0.0:
            return span_s  # as a rule: the others, of which there may be hundreds, need no look
        fingerprint = first.identity.fingerprint
        spans_s = (
            _room_in_s(worker, priority, now)
            for worker in self._registry.ready(first.role)
            if worker.identity.fingerprint == fingerprint and not worker.suspect
        )
        return min(spans_s, default=0.0)

    def before_s(self, one: RequestClass, key: str, num_tokens: int) -> float:
        """Seconds of each worker that computes prompts until it is the turn of a new one of so many tokens.

        Without goals the shortest come first. With goals all that are held count: a prompt that passes takes from the
        slack of the others.
        """
        if not self._waiting.num_held:
            return 0.0
        return self._waiting.ahead(one, key, 0 if one.ttft_s > 0 else num_tokens)[0] / self._num_workers

    def ahead(self, one: RequestClass, key: str) -> tuple[float, int]:
        """What all held requests of this class and key and before them take: seconds of each worker that computes
        prompts, and places of each decode worker."""
        if not self._waiting.num_held:
            return 0.0, 0
        seconds, num = self._waiting.ahead(one, key)
        return seconds / self._num_workers, -(-num // max(1, len(self._registry.ready("decode"))))

    def waits(self, now: float) -> Iterator[tuple[RequestState, float]]:
        """Held requests in turn, with the seconds until a worker takes each."""
        decode = self._registry.ready("decode")
        first = min(decode, key=place_s, default=None)
        before_s = 0.0
        for number, state in enumerate(self._waiting.held(now)):
            batch_s = place_s(first, num_more=number // len(decode)) if first is not None else 0.0
            yield state, max(before_s / self._num_workers, batch_s)
            before_s += state.held_s or 0.0

    @property
    def held_s(self) -> float:
        """Seconds that all held prompts take of each worker."""
        return self._waiting.held_s / self._num_workers if self._waiting.num_held else 0.0

    @property
    def _num_workers(self) -> int:
        """Workers that compute prompts: those of the prefill pool, or of the decode pool alone."""
        return max(1, len(self._registry.ready("prefill") or self._registry.ready("decode")))


def _room_in_s(worker: Worker, priority: int, now: float) -> float:
    return queued_s(worker, now, priority) - enough_s(worker) if _is_known(worker) else 0.0


def _is_known(worker: Worker) -> bool:
    """Whether something is known of prompts there: each step of a prefill worker has some."""
    return worker.step_model.knows_prompts or (worker.role == "prefill" and worker.step_model.is_known)
