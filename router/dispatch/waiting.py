"""Requests that were admitted and are on no worker, in the order in which they get places. Pure.

1. Answers that have begun, oldest first: their streams stand still.
2. The others by priority, the highest first.
3. Of one priority, the class that got the fewest tokens for its share. Classes without a share of their own are one
   class here, of share 1 (`token_counters.py`).
4. Of one such class, the key that got the fewest tokens: a key with a thousand requests delays another's by one of its
   own.
5. Of one key, the request that must be computed soonest to be in time; then those that cannot be, and those without a
   goal, the shortest first.

Nothing starves: each `ELDER_TURNS`th place goes to the oldest request, once it has waited `AGE_CAP_S`.

A prompt also waits here although a worker would take it, once each worker has prompts for some steps (`Holding`). In
the router the order of prompts is open: a prompt of higher priority, or of a key that got less, may still pass, and the
first worker that has room takes the next prompt. A worker that has a few steps of prompts is busy all the same.
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
"""Shorter than `--queue-timeout-s`, at whose end a request fails."""
ELDER_TURNS = 8
"""Every so many places, one goes to the oldest request: enough to end every wait, and little for the others."""
OUTPUT_WEIGHT = 2
"""Tokens of a prompt that count as much as one of an answer, which needs a step for itself."""

Turn = tuple[float, int, float, str]
"""The latest time to begin, tokens, when it was accepted, id: sorts the requests of a key."""


@dataclass(slots=True)
class _Line:
    """The waiting requests of a key in one lane. Held ones have `prompts_s` seconds, by id, `held_s` in all."""

    turns: list[Turn] = field(default_factory=list)
    held_s: float = 0.0
    prompts_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_held(self) -> int:
        return len(self.prompts_s)

    def in_turn(self, now: float) -> Iterator[str]:
        """Ids, those that cannot be in time any more behind those that can. Over a copy; often the first is enough."""
        late = bisect_left(self.turns, (now,))
        return (turn[-1] for turn in (*self.turns[late:], *self.turns[:late]))

    def add(self, state: RequestState) -> Turn:
        insort(self.turns, turn := _turn(state))
        if state.held_s is not None:
            self.prompts_s[state.request.request_id] = state.held_s
            self.held_s += state.held_s
        return turn

    def remove(self, state: RequestState, turn: Turn) -> None:
        del self.turns[bisect_left(self.turns, turn)]
        if self.prompts_s.pop(state.request.request_id, None) is not None:
            self.held_s -= state.held_s or 0.0

    def before(self, num_tokens: int) -> tuple[float, int]:
        """Seconds of held prompts whose turn comes before a new one of so many tokens without a goal; their number."""
        earlier = self.turns[: bisect_left(self.turns, (math.inf, num_tokens + 1))]
        found = [self.prompts_s[turn[-1]] for turn in earlier if turn[-1] in self.prompts_s]
        return sum(found), len(found)


@dataclass(slots=True)
class _Lane:
    """The requests of one priority that have one share together: their keys divide what it gets."""

    share: float
    lines: dict[str, _Line] = field(default_factory=dict)
    keys: TokenCounters = field(default_factory=TokenCounters)

    def in_turn(self, now: float) -> Iterator[str]:
        """Ids; whose turn it is may change with each one that is placed."""
        return self.keys.in_turn({key: line.in_turn(now) for key, line in self.lines.items()})

    def ahead(self, key: str, num_tokens: int) -> tuple[float, int]:
        """Seconds of held prompts before a new request, and their number. Other keys get as much as its own."""
        mine = self.lines.get(key, _Line())
        mine_s, num_mine = mine.before(num_tokens) if num_tokens else (mine.held_s, mine.num_held)
        others = [line for other, line in self.lines.items() if other != key]
        held_s = mine_s + sum(min(line.held_s, mine_s) for line in others)
        return held_s, num_mine + sum(min(line.num_held, num_mine) for line in others)

    @property
    def held_s(self) -> float:
        return sum(line.held_s for line in self.lines.values())

    @property
    def num_held(self) -> int:
        return sum(line.num_held for line in self.lines.values())


class WaitingRequests:
    """The one queue of a router: new requests, and those that lost their workers."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._begun: dict[str, RequestState] = {}
        self._turns: dict[str, Turn] = {}
        self._lanes: dict[int, dict[str, _Lane]] = {}  # by priority and name: as many as there are classes, and kept
        self._shares: dict[int, TokenCounters] = {}  # by priority, between its lanes
        self.num_held = 0
        self._num_turns = 0  # since the oldest request had one

    def add(self, state: RequestState, now: float) -> None:
        """Let a request wait; it has waited since `now`. A key that was absent gets no turns for that time."""
        self.discard(state)
        state.times.queued_at = now
        self._states[state.request.request_id] = state
        if state.stream.token_ids:
            self._begun[state.request.request_id] = state
            return
        self._insert(state)

    def hold(self, state: RequestState, prompt_s: float) -> None:
        """A waiting request has a place only once prompts before it are computed; its own takes `prompt_s`."""
        request = state.request
        line = self._lane(state).lines[request.key]
        line.remove(state, self._turns[request.request_id])
        self.num_held += state.held_s is None
        state.held_s = prompt_s
        self._turns[request.request_id] = line.add(state)

    def placed(self, state: RequestState) -> None:
        """A waiting request got a place: its class and key pay for the prompt, once the answer has begun no more."""
        if state.request.request_id not in self._begun:
            self.charge(state, len(state.request.prompt_token_ids))
        self._num_turns = 0 if state is next(iter(self._states.values()), None) else self._num_turns + 1
        self.discard(state)

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """The class and the key of a request got so many tokens."""
        request, lane = state.request, self._lane(state)
        self._shares[request.priority].charge(request.lane, num_tokens, lane.share)
        lane.keys.charge(request.key, num_tokens)

    def discard(self, state: RequestState) -> None:
        """The request was placed, or is over. Does nothing for one that does not wait."""
        request_id = state.request.request_id
        if self._states.pop(request_id, None) is None or self._begun.pop(request_id, None) is not None:
            return
        self._remove(state)
        self.num_held -= state.held_s is not None
        state.held_s = None

    def __contains__(self, state: object) -> bool:
        return isinstance(state, RequestState) and state.request.request_id in self._states

    def __iter__(self) -> Iterator[RequestState]:
        """The oldest first; over a copy, so requests may come and go meanwhile."""
        return iter(list(self._states.values()))

    def __len__(self) -> int:
        return len(self._states)

    def in_turn(self, now: float) -> Iterator[RequestState]:
        """Each once, in the order in which places are given. Requests may be placed and discarded meanwhile."""
        seen: set[str] = set()
        for request_id in chain(list(self._begun), self._by_priority(now)):
            yield from self._elder(now, seen)
            if request_id not in seen and (state := self._states.get(request_id)) is not None:
                seen.add(request_id)
                yield state

    def ahead(self, one: RequestClass, key: str, num_tokens: int = 0) -> tuple[float, int]:
        """Seconds of held prompts before a new request of a class and a key, and their number.

        Other keys get as much as its own, and other lanes of its priority as much as their shares say. With
        `num_tokens`, of a prompt without a goal, those that are longer come behind it; 0: all come before.
        """
        lanes = self._lanes.get(one.priority, {})
        own = lanes.get(one.lane)
        before_s, num_before = own.ahead(key, num_tokens) if own is not None else (0.0, 0)
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
        """Held requests, in turn."""
        return [state for state in self.in_turn(now) if state.held_s is not None]

    @property
    def held_s(self) -> float:
        """Seconds of all held prompts."""
        return sum(lane.held_s for lanes in self._lanes.values() for lane in lanes.values())

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
        """Ids of requests whose answer has not begun; whose turn it is may change with each one that is placed."""
        for priority in sorted(self._lanes, reverse=True):
            lanes = {name: lane.in_turn(now) for name, lane in self._lanes[priority].items() if lane.lines}
            yield from self._shares[priority].in_turn(lanes)

    def _elder(self, now: float, seen: set[str]) -> Iterator[RequestState]:
        """The oldest request, when it has a turn before its own."""
        oldest = next(iter(self._states.values()), None)
        if oldest is None or self._num_turns < ELDER_TURNS - 1 or now - oldest.times.queued_at <= AGE_CAP_S:
            return
        if oldest.request.request_id not in seen:
            seen.add(oldest.request.request_id)
            yield oldest

    def _insert(self, state: RequestState) -> None:
        request, lane = state.request, self._lane(state)
        if not lane.lines:
            self._shares[request.priority].join(request.lane)
        if (line := lane.lines.get(request.key)) is None:
            lane.keys.join(request.key)
            line = lane.lines[request.key] = _Line()
        self._turns[request.request_id] = line.add(state)

    def _remove(self, state: RequestState) -> None:
        request, lane = state.request, self._lane(state)
        line = lane.lines[request.key]
        line.remove(state, self._turns.pop(request.request_id))
        if not line.turns:
            del lane.lines[request.key]
            lane.keys.leave(request.key)
        if not lane.lines:
            self._shares[request.priority].leave(request.lane)


def _turn(state: RequestState) -> Turn:
    request = state.request
    begin_at = state.times.accepted_at + request.ttft_s - (state.held_s or 0.0) if request.ttft_s > 0 else math.inf
    return begin_at, len(request.prompt_token_ids), state.times.accepted_at, request.request_id


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
        if not first.life.suspect and (span_s := _room_in_s(first, priority, now)) <= 0.0:
            return span_s  # as a rule: the others, of which there may be hundreds, need no look
        fingerprint = first.identity.fingerprint
        spans_s = (
            _room_in_s(worker, priority, now)
            for worker in self._registry.ready(first.role)
            if worker.identity.fingerprint == fingerprint and not worker.life.suspect
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
    return worker.load.step_model.knows_prompts or (worker.role == "prefill" and worker.load.step_model.is_known)
