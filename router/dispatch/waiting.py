"""Queue of admitted requests that are on no worker. Pure.

Order:

1. Answers that have begun, oldest first: their streams are stalled.
2. The others by priority, highest first.
3. Within a priority, the class with the fewest tokens for its share. Classes without a share count as one class of
share 1 (`token_counters.py`).
4. Within such a class, the key with the fewest tokens. A key with a thousand requests delays a request of another key
by one request.
5. Within a key, the request that must start soonest to meet its goal. Then requests that are too late, and those
without a goal, shortest first.

Every `PLACEMENTS_PER_OLDEST`th placement goes to the oldest request that has waited `AGE_CAP_S`, so no request starves.
It needs a worker with capacity for its priority. While there is none, higher priorities pass it.

A prompt is also held here, although a worker would accept it, once each worker has enough prompts for some steps
(`HeldPrompts`). While it is held, a prompt of higher priority or of a key with fewer tokens may pass it, and the first
worker with capacity takes the next prompt. A few steps of prompts keep a worker busy.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from common.config import RequestClass
from common.latency import StepShape
from router.dispatch.request_state import RequestState
from router.fleet import Worker, WorkerRegistry
from router.policy import Choice, TokenCounters, model_of, place_s, queued_s, step_tokens

AGE_CAP_S = 10.0
"""Age at which a request counts as old, in seconds. Shorter than `--queue-timeout-s`, after which a request fails."""
PLACEMENTS_PER_OLDEST = 8
"""One of this many placements goes to the oldest request: enough to end every wait, at little cost for the others."""
OUTPUT_WEIGHT = 2
"""Prompt tokens that count as much as one output token, which needs its own step."""

SortKey = tuple[float, int, float, str]
"""Sort key of a request: latest start time, number of tokens, time of arrival, id."""


@dataclass(slots=True)
class _KeyQueue:
    """Queued requests of a key in one lane. `prompts_s` maps ids of held requests to seconds, `held_s` is the sum."""

    sort_keys: list[SortKey] = field(default_factory=list)
    held_s: float = 0.0
    prompts_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_held(self) -> int:
        return len(self.prompts_s)

    def in_order(self, now: float) -> Iterator[str]:
        """Iterate over a copy of the ids: those that can meet their goal first."""
        late = bisect_left(self.sort_keys, (now,))
        return (sort_key[-1] for sort_key in (*self.sort_keys[late:], *self.sort_keys[:late]))

    def add(self, state: RequestState) -> SortKey:
        insort(self.sort_keys, sort_key := _sort_key(state))
        if state.held_s is not None:
            self.prompts_s[state.request.request_id] = state.held_s
            self.held_s += state.held_s
        return sort_key

    def remove(self, state: RequestState, sort_key: SortKey) -> None:
        del self.sort_keys[bisect_left(self.sort_keys, sort_key)]
        if self.prompts_s.pop(state.request.request_id, None) is not None:
            self.held_s -= state.held_s or 0.0

    def before(self, num_tokens: int, now: float | None) -> tuple[float, int]:
        """Return the seconds and number of held prompts before a new one: see `WaitingRequests.ahead`."""
        if not num_tokens and now is None:
            return self.held_s, self.num_held
        first = bisect_left(self.sort_keys, (now,)) if now is not None else 0
        end = bisect_left(self.sort_keys, (math.inf, num_tokens + 1)) if num_tokens else len(self.sort_keys)
        earlier = self.sort_keys[first:end]
        found = [self.prompts_s[sort_key[-1]] for sort_key in earlier if sort_key[-1] in self.prompts_s]
        return sum(found), len(found)


@dataclass(slots=True)
class _Lane:
    """Queued requests of one priority that have one share in common, which their keys divide."""

    share: float
    queues: dict[str, _KeyQueue] = field(default_factory=dict)
    keys: TokenCounters = field(default_factory=TokenCounters)

    def in_order(self, now: float) -> Iterator[str]:
        """Iterate over the ids. The order may change with each placement."""
        return self.keys.in_order({key: queue.in_order(now) for key, queue in self.queues.items()})

    def ahead(self, key: str, num_tokens: int, now: float | None) -> tuple[float, int]:
        """Return the seconds and number of held prompts before a new request. Other keys get as much as its own."""
        mine = self.queues.get(key, _KeyQueue())
        mine_s, num_mine = mine.before(num_tokens, now)
        others = [queue for other, queue in self.queues.items() if other != key]
        held_s = mine_s + sum(min(queue.held_s, mine_s) for queue in others)
        return held_s, num_mine + sum(min(queue.num_held, num_mine) for queue in others)

    @property
    def held_s(self) -> float:
        return sum(queue.held_s for queue in self.queues.values())

    @property
    def num_held(self) -> int:
        return sum(queue.num_held for queue in self.queues.values())


class WaitingRequests:
    """The router's queue: new requests, and requests that lost their workers."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._begun: dict[str, RequestState] = {}
        self._sort_keys: dict[str, SortKey] = {}
        self._lanes: dict[int, dict[str, _Lane]] = {}  # by priority and name; never removed, as classes are few
        self._shares: dict[int, TokenCounters] = {}  # by priority, between its lanes
        self.num_held = 0
        self._num_since_oldest = 0  # placements since the oldest request was placed

    def add(self, state: RequestState, now: float) -> None:
        """Queue a request as of `now`. A key that was absent has not saved up sort_keys."""
        self.discard(state)
        state.times.queued_at = now
        self._states[state.request.request_id] = state
        if state.stream.token_ids:
            self._begun[state.request.request_id] = state
            return
        self._insert(state)

    def hold(self, state: RequestState, prompt_s: float) -> None:
        """Mark a queued request as held until earlier prompts are computed. Its own prompt takes `prompt_s`."""
        request = state.request
        queue = self._lane(state).queues[request.key]
        queue.remove(state, self._sort_keys[request.request_id])
        self.num_held += state.held_s is None
        state.held_s = prompt_s
        self._sort_keys[request.request_id] = queue.add(state)

    def placed(self, state: RequestState) -> None:
        """Remove a request that was placed. Charges its class and key for the prompt, unless the answer has begun."""
        if state.request.request_id not in self._begun:
            self.charge(state, len(state.request.prompt_token_ids))
        self._num_since_oldest = 0 if state is next(iter(self._states.values()), None) else self._num_since_oldest + 1
        self.discard(state)

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """Charge the class and key of a request for `num_tokens` tokens."""
        request, lane = state.request, self._lane(state)
        self._shares[request.priority].charge(request.lane, num_tokens, lane.share)
        lane.keys.charge(request.key, num_tokens)

    def discard(self, state: RequestState) -> None:
        """Remove a request that was placed or has ended. Does nothing if it is not queued."""
        request_id = state.request.request_id
        if self._states.pop(request_id, None) is None or self._begun.pop(request_id, None) is not None:
            return
        self._remove(state)
        self.num_held -= state.held_s is not None
        state.held_s = None

    def __contains__(self, state: object) -> bool:
        return isinstance(state, RequestState) and state.request.request_id in self._states

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate in the order of `queued_at`, over a copy: requests may be added and removed during the iteration."""
        return iter(list(self._states.values()))

    def __len__(self) -> int:
        return len(self._states)

    def in_order(self, now: float) -> Iterator[RequestState]:
        """Iterate in placement order. Requests may be placed and discarded during the iteration."""
        seen: set[str] = set()
        for request_id in chain(list(self._begun), self._by_priority(now)):
            yield from self._overdue_oldest(now, seen)
            if request_id not in seen and (state := self._states.get(request_id)) is not None:
                seen.add(request_id)
                yield state

    def ahead(self, one: RequestClass, key: str, num_tokens: int = 0, now: float | None = None) -> tuple[float, int]:
        """Return the seconds and number of held prompts before a new request of a class and a key.

        Other keys get as much as its own, and other lanes of its priority as much as their shares allow. With
        `num_tokens`, the size of a prompt without a goal, longer prompts come after it. With 0, all come before. With
        `now`, those come after it that are too late to meet their goal.
        """
        lanes = self._lanes.get(one.priority, {})
        own = lanes.get(one.lane)
        before_s, num_before = own.ahead(key, num_tokens, now) if own is not None else (0.0, 0)
        held_s, num_held = before_s, num_before
        for name, lane in lanes.items():
            if name != one.lane:
                times = lane.share / one.weight
                held_s += min(lane.held_s, times * before_s)
                num_held += min(lane.num_held, round(times * num_before))
        for lane in self._higher(one.priority):
            held_s, num_held = held_s + lane.held_s, num_held + lane.num_held
        return held_s, num_held

    def held(self, now: float) -> list[RequestState]:
        """Return the held requests in order."""
        return [state for state in self.in_order(now) if state.held_s is not None]

    @property
    def held_s(self) -> float:
        """Total seconds of all held prompts."""
        return sum(lane.held_s for lanes in self._lanes.values() for lane in lanes.values())

    def held_from_s(self, priority: int) -> float:
        """Return the total seconds of the held prompts of at least `priority`."""
        return sum(lane.held_s for lane in self._higher(priority - 1))

    # ------------------------------------------------------------ inside

    def _lane(self, state: RequestState) -> _Lane:
        request = state.request
        if (lanes := self._lanes.get(request.priority)) is None:
            lanes = self._lanes[request.priority] = {}
            self._shares[request.priority] = TokenCounters()
        if (lane := lanes.get(request.lane)) is None:
            lane = lanes[request.lane] = _Lane(request.weight)
        return lane

    def _higher(self, priority: int) -> Iterator[_Lane]:
        return (lane for level, lanes in self._lanes.items() if level > priority for lane in lanes.values())

    def _by_priority(self, now: float) -> Iterator[str]:
        """Iterate over the ids of requests whose answers have not begun. The order may change with each placement."""
        for priority in sorted(self._lanes, reverse=True):
            lanes = {name: lane.in_order(now) for name, lane in self._lanes[priority].items() if lane.queues}
            yield from self._shares[priority].in_order(lanes)

    def _overdue_oldest(self, now: float, seen: set[str]) -> Iterator[RequestState]:
        """Yield the oldest request if one of its extra placements is due."""
        oldest = next(iter(self._states.values()), None)
        if (
            oldest is None
            or self._num_since_oldest < PLACEMENTS_PER_OLDEST - 1
            or now - oldest.times.queued_at <= AGE_CAP_S
        ):
            return
        if oldest.request.request_id not in seen:
            seen.add(oldest.request.request_id)
            yield oldest

    def _insert(self, state: RequestState) -> None:
        request, lane = state.request, self._lane(state)
        if not lane.queues:
            self._shares[request.priority].join(request.lane)
        if (queue := lane.queues.get(request.key)) is None:
            lane.keys.join(request.key)
            queue = lane.queues[request.key] = _KeyQueue()
        self._sort_keys[request.request_id] = queue.add(state)

    def _remove(self, state: RequestState) -> None:
        request, lane = state.request, self._lane(state)
        queue = lane.queues[request.key]
        queue.remove(state, self._sort_keys.pop(request.request_id))
        if not queue.sort_keys:
            del lane.queues[request.key]
            lane.keys.leave(request.key)
        if not lane.queues:
            self._shares[request.priority].leave(request.lane)


def _sort_key(state: RequestState) -> SortKey:
    request = state.request
    return _begin_at(state), len(request.prompt_token_ids), state.times.accepted_at, request.request_id


def _begin_at(state: RequestState) -> float:
    """Return when the prompt must leave the queue to meet its goal; infinity without one.

    The prompts that its worker has already, up to `HOLD_S`, take time too. Without that margin each prompt of an
    overload would leave the queue when it is about to become late, and would become late on its worker.
    """
    ttft_s = state.request.ttft_s
    if ttft_s <= 0:
        return math.inf
    return state.times.accepted_at + ttft_s - (state.held_s or 0.0) - min(HOLD_S, MARGIN_SHARE * ttft_s)


def misses_goal(state: RequestState, now: float) -> bool:
    """Return whether a held prompt will miss its goal wherever it is computed."""
    return _begin_at(state) < now


MARGIN_SHARE = 1 / 3
"""Maximum margin for the prompts on a worker, as a share of the goal."""
HOLD_STEPS, HOLD_S = 3, 0.1
"""Full steps, and seconds, of prompts that are enough for a worker. They cover the latency of a message. For
prompts that miss their goals, only the seconds count."""


def enough_s(worker: Worker) -> float:
    """Return the seconds of prompts that keep a worker busy until its next report."""
    full = StepShape.of_prompt(0, step_tokens(worker))
    return max(HOLD_S, HOLD_STEPS * model_of(worker).seconds(full))


class HeldPrompts:
    """Decides which queued requests are held, and predicts for how long."""

    def __init__(self, registry: WorkerRegistry, waiting: WaitingRequests) -> None:
        self._registry, self._waiting = registry, waiting

    @property
    def holds_any(self) -> bool:
        """Whether any request is held."""
        return self._waiting.num_held > 0

    def concerns(self, choice: Choice) -> bool:
        """Return whether the choice needs the pool that computes prompts. Other requests are never held."""
        return choice.prefill is not None or not self._registry.ready("prefill")

    def room_in_s(self, choice: Choice, priority: int, now: float, *, is_late: bool = False) -> float:
        """Return the seconds until a worker like the chosen one needs prompts of at least `priority`; <= 0: now.

        A prompt that `is_late` leaves room for others, which pass it on the worker.
        """
        first = choice.prefill or choice.decode
        if first is None:
            return 0.0
        if not first.life.suspect and (span_s := _room_in_s(first, priority, now, is_late)) <= 0.0:
            return span_s  # the common case: skip the others, of which there may be hundreds
        fingerprint = first.identity.fingerprint
        spans_s = (
            _room_in_s(worker, priority, now, is_late)
            for worker in self._registry.ready(first.role)
            if worker.identity.fingerprint == fingerprint and not worker.life.suspect
        )
        return min(spans_s, default=0.0)

    def before_s(self, one: RequestClass, key: str, num_tokens: int, now: float) -> float:
        """Return the seconds of each prompt-computing worker before a new prompt of `num_tokens` tokens is placed.

        Without goals, the shortest prompt comes first. With goals all held prompts count that can still meet theirs,
        because a prompt that passes others uses up their slack.
        """
        if not self._waiting.num_held:
            return 0.0
        ahead = self._waiting.ahead(one, key, now=now) if one.ttft_s > 0 else self._waiting.ahead(one, key, num_tokens)
        return ahead[0] / self._num_workers

    def others_s(self, state: RequestState) -> float:
        """Return the seconds of each prompt-computing worker of the other held prompts of at least its priority.

        Those that come after it count too: without them, no decode worker would take a prompt from a long queue.
        """
        if not self._waiting.num_held:
            return 0.0
        held_s = self._waiting.held_from_s(state.request.priority) - (state.held_s or 0.0)
        return max(0.0, held_s) / self._num_workers

    def ahead(self, one: RequestClass, key: str, now: float | None = None) -> tuple[float, int]:
        """Return the cost of the held requests up to this class and key. For `now` see `WaitingRequests.ahead`.

        That is seconds of each worker that computes prompts, and batch slots of each decode worker.
        """
        if not self._waiting.num_held:
            return 0.0, 0
        seconds, num = self._waiting.ahead(one, key, now=now)
        return seconds / self._num_workers, -(-num // max(1, len(self._registry.ready("decode"))))

    def waits(self, now: float) -> Iterator[tuple[RequestState, float]]:
        """Iterate over held requests in order, with the seconds until a worker takes each."""
        decode = self._registry.ready("decode")
        first = min(decode, key=place_s, default=None)
        before_s = 0.0
        for number, state in enumerate(self._waiting.held(now)):
            batch_s = place_s(first, num_more=number // len(decode)) if first is not None else 0.0
            yield state, max(before_s / self._num_workers, batch_s)
            before_s += state.held_s or 0.0

    @property
    def held_s(self) -> float:
        """Seconds of all held prompts for each worker."""
        return self._waiting.held_s / self._num_workers if self._waiting.num_held else 0.0

    @property
    def _num_workers(self) -> int:
        """Number of workers that compute prompts: the prefill pool, or the decode pool if there is none."""
        return max(1, len(self._registry.ready("prefill") or self._registry.ready("decode")))


def _room_in_s(worker: Worker, priority: int, now: float, is_late: bool) -> float:
    if not _is_known(worker):
        return 0.0
    return queued_s(worker, now, priority) - (HOLD_S if is_late else enough_s(worker))


def _is_known(worker: Worker) -> bool:
    """Return whether prompt times are known. Every step of a prefill worker contains prompts."""
    return worker.load.step_model.knows_prompts or (worker.role == "prefill" and worker.load.step_model.is_known)
