"""Requests that were admitted and are on no worker, in the order in which they get places. Pure.

1. Answers that have begun, oldest first: their streams stand still.
2. The others by priority, the highest first.
3. Of one priority, the key that got the fewest tokens so far (Sheng et al., "Fairness in Serving Large Language
   Models", OSDI 2024): a key with a thousand requests delays another's by one of its own.
4. Of one key, the request that must be computed soonest to be in time; then those that cannot be, and those without a
   goal, the shortest first.

Nothing starves: each `ELDER_TURNS`th place goes to the oldest request, once it has waited `AGE_CAP_S`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from router.dispatch.request_state import RequestState

AGE_CAP_S = 10.0
"""Shorter than `--queue-timeout-s`, at whose end a request fails."""
ELDER_TURNS = 8
"""Enough to end every wait, and little for those that can meet their goals."""
OUTPUT_WEIGHT = 2
"""Tokens of a prompt that count as much as one of an answer, which needs a step for itself."""

Group = tuple[int, str]
"""Priority, and name of the key."""
Turn = tuple[float, int, float, str]
"""The latest time to begin, tokens, when it was accepted, id: sorts the requests of a group."""


@dataclass(slots=True)
class _Line:
    """The waiting requests of a group. The `num_held` that are held have `held_s` seconds of prompts."""

    turns: list[Turn] = field(default_factory=list)
    held_s: float = 0.0
    num_held: int = 0

    def in_turn(self, now: float) -> Iterator[str]:
        """Ids, those that cannot be in time any more behind those that can. Over a copy; often the first is enough."""
        late = bisect_left(self.turns, (now,))
        return (turn[-1] for turn in (*self.turns[late:], *self.turns[:late]))


class WaitingRequests:
    """The one queue of a router: new requests, and those that lost their workers."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._begun: dict[str, RequestState] = {}
        self._turns: dict[str, Turn] = {}
        self._lines: dict[Group, _Line] = {}
        self._num_tokens: dict[Group, int] = {}
        self._floor: dict[int, int] = {}  # by priority: what the group that had the last turn had got before it
        self.num_held = 0
        self._num_turns = 0  # since the oldest request had one

    def add(self, state: RequestState, now: float) -> None:
        """Let a request wait; it has waited since `now`. A group that was absent gets no turns for that time."""
        self.discard(state)
        state.queued_at = now
        self._states[state.request.request_id] = state
        if state.stream.token_ids:
            self._begun[state.request.request_id] = state
            return
        group = _group(state)
        if group not in self._lines:
            self._num_tokens[group] = max(self._num_tokens.get(group, 0), self._floor.get(group[0], 0))
        self._insert(state)

    def hold(self, state: RequestState, prompt_s: float) -> None:
        """A waiting request has a place only once prompts before it are computed; its own takes `prompt_s`."""
        self._remove(state)
        self.num_held += state.held_s is None
        state.held_s = prompt_s
        self._insert(state)

    def placed(self, state: RequestState) -> None:
        """A waiting request got a place: its key pays for the prompt, once the answer has begun no more."""
        if state.request.request_id not in self._begun:
            priority, _ = group = _group(state)
            self._floor[priority] = max(self._floor.get(priority, 0), self._num_tokens.get(group, 0))
            self.charge(state, len(state.request.prompt_token_ids))
        self._num_turns = 0 if state is next(iter(self._states.values()), None) else self._num_turns + 1
        self.discard(state)

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """The key of a request got so many tokens."""
        priority, _ = group = _group(state)
        self._num_tokens[group] = max(self._num_tokens.get(group, 0), self._floor.get(priority, 0)) + num_tokens

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

    def ahead(self, priority: int, key: str) -> tuple[float, int]:
        """Seconds of held prompts before a new request, and their number. Other keys get as much as its own."""
        mine = self._lines.get((priority, key), _Line())
        held_s, num_held = mine.held_s, mine.num_held
        for group, line in self._lines.items():
            if group[0] > priority:
                held_s, num_held = held_s + line.held_s, num_held + line.num_held
            elif group[0] == priority and group[1] != key:
                held_s += min(line.held_s, mine.held_s)
                num_held += min(line.num_held, mine.num_held)
        return held_s, num_held

    def held(self, now: float) -> list[RequestState]:
        """Held requests, in turn."""
        return [state for state in self.in_turn(now) if state.held_s is not None]

    @property
    def held_s(self) -> float:
        """Seconds of all held prompts."""
        return sum(line.held_s for line in self._lines.values())

    # ------------------------------------------------------------ inside

    def _by_priority(self, now: float) -> Iterator[str]:
        """Ids of requests whose answer has not begun; whose turn it is may change with each one that is placed."""
        for priority in sorted({group[0] for group in self._lines}, reverse=True):
            lines = {group: line.in_turn(now) for group, line in self._lines.items() if group[0] == priority}
            while lines:
                group = min(lines, key=lambda group: self._num_tokens.get(group, 0))
                if (request_id := next(lines[group], None)) is None:
                    del lines[group]
                else:
                    yield request_id

    def _elder(self, now: float, seen: set[str]) -> Iterator[RequestState]:
        """The oldest request, when it has a turn before its own."""
        oldest = next(iter(self._states.values()), None)
        if oldest is None or self._num_turns < ELDER_TURNS - 1 or now - oldest.queued_at <= AGE_CAP_S:
            return
        if oldest.request.request_id not in seen:
            seen.add(oldest.request.request_id)
            yield oldest

    def _insert(self, state: RequestState) -> None:
        line = self._lines.setdefault(_group(state), _Line())
        turn = self._turns[state.request.request_id] = _turn(state)
        insort(line.turns, turn)
        line.held_s += state.held_s or 0.0
        line.num_held += state.held_s is not None

    def _remove(self, state: RequestState) -> None:
        group, turn = _group(state), self._turns.pop(state.request.request_id)
        line = self._lines[group]
        del line.turns[bisect_left(line.turns, turn)]
        line.held_s -= state.held_s or 0.0
        line.num_held -= state.held_s is not None
        if not line.turns:
            del self._lines[group]
            if self._num_tokens.get(group, 0) <= self._floor.get(group[0], 0):
                self._num_tokens.pop(group, None)


def _group(state: RequestState) -> Group:
    return state.request.priority, state.request.key


def _turn(state: RequestState) -> Turn:
    request = state.request
    begin_at = state.accepted_at + request.ttft_s - (state.held_s or 0.0) if request.ttft_s > 0 else math.inf
    return begin_at, len(request.prompt_token_ids), state.accepted_at, request.request_id
