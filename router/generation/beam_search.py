"""Beam search: the likeliest continuations of a prompt, several tokens at a time kept side by side. Pure.

As `transformers` and vLLM search: in each step every beam grows by its likeliest tokens, and of all that come out of it
the best `width` go on. A continuation that ends competes by its log-probability over its length to the power of
`length_penalty`. The search ends when no beam can beat the finished ones any more, so it finds what a search to the
last token would find.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from common.wire import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation: `logprobs` has an item for each of `token_ids`. `finish_reason` is "" while it may go on."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    sum_logprobs: float = 0.0
    finish_reason: str = ""

    def followed_by(self, token_id: int, logprobs: TokenLogprobs, finish_reason: str = "") -> Beam:
        return Beam(
            (*self.token_ids, token_id),
            (*self.logprobs, logprobs),
            self.sum_logprobs + logprobs.logprob,
            finish_reason,
        )


class _Candidate(NamedTuple):
    """A beam and a possible next token. Most candidates are dropped, so tokens are copied only for a chosen one."""

    sum_logprobs: float
    beam: Beam
    token_id: int
    logprob: float
    alternatives: TokenLogprobs

    def grown(self, finish_reason: str = "") -> Beam:
        own = TokenLogprobs(self.logprob, self.alternatives.top)
        return self.beam.followed_by(self.token_id, own, finish_reason)


class BeamSearch:
    """`running` are the beams that need a next token, with `num_candidates` alternatives to it."""

    def __init__(
        self, width: int, max_tokens: int, end_token_ids: Collection[int], *, length_penalty: float = 1.0
    ) -> None:
        self._width, self._max_tokens, self._length_penalty = width, max_tokens, length_penalty
        self._end_token_ids = frozenset(end_token_ids)
        self.running = [Beam()]
        self._finished: list[Beam] = []

    @property
    def num_candidates(self) -> int:
        """How many alternatives each beam gets: enough for `width` beams to go on though each could also end."""
        return self._width + max(self._width, len(self._end_token_ids))

    def advance(self, found: Sequence[TokenLogprobs], banned: Sequence[Collection[int]]) -> None:
        """Let every running beam grow; `found` has the alternatives of each, in their order.

        Those of a beam's `banned` tokens do not count, and of the others no more than `num_candidates`.
        """
        grown: list[_Candidate] = []
        for beam, alternatives, bans in zip(self.running, found, banned, strict=True):
            free = (each for each in alternatives.top if each[0] not in bans)
            for token_id, logprob in islice(free, self.num_candidates):
                one = _Candidate(beam.sum_logprobs + logprob, beam, token_id, logprob, alternatives)
                if token_id in self._end_token_ids:
                    self._finished.append(one.grown("stop"))
                else:
                    grown.append(one)
        self.running = [one.grown() for one in heapq.nlargest(self._width, grown, key=lambda one: one.sum_logprobs)]
        if self.running and len(self.running[0].token_ids) >= self._max_tokens:
            self._finished += [Beam(b.token_ids, b.logprobs, b.sum_logprobs, "length") for b in self.running]
            self.running = []
        self._finished = heapq.nlargest(self._width, self._finished, key=self._score)
        if len(self._finished) == self._width and self._bound() <= self._score(self._finished[-1]):
            self.running = []

    def best(self) -> list[Beam]:
        """The finished continuations, the best first: `width` of them once none is running."""
        return list(self._finished)

    def _score(self, beam: Beam) -> float:
        """An end token counts in the sum, and not in the length."""
        length = len(beam.token_ids) - (beam.finish_reason == "stop")
        return float(beam.sum_logprobs / max(1, length) ** self._length_penalty)

    def _bound(self) -> float:
        """No running beam can reach a higher score than this: its sum only falls."""
        if not self.running:
            return -float("inf")
        length = self._max_tokens if self._length_penalty > 0 else len(self.running[0].token_ids)
        return float(self.running[0].sum_logprobs / max(1, length) ** self._length_penalty)
