"""A request as seen by routing, including what a worker fetches of its prompt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from common.latency import StepShape
from common.wire.messages import KVPeer
from router.fleet import Worker


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """A fetch that gives the worker the prompt's first `end` tokens after `seconds`.

    They are pulled from `peer`, whose control address is `lender` and which is busy with it for `lending_s`. None: they
    are read from the worker's own disk.
    """

    end: int
    seconds: float
    peer: KVPeer | None = None
    lender: str = ""
    lending_s: float = 0.0


NO_HITS: Mapping[str, int] = MappingProxyType({})


class RequestShape(msgspec.Struct, frozen=True, gc=False):
    """Sizes, goals and cache hits of a request.

    `hits`: cached prompt tokens by worker address. `fetches`: blocks that a worker would read from disk or pull from a
    peer. `alone`: one worker must compute the prompt and the answer. The answer is limited to `num_remaining` tokens
    and predicted to have `num_expected`. Prompts of lower `priority` cause no delay. Prompts held by the router take
    `held_s` seconds of each prefill worker before it. `ttft_s` and `tpot_s` are the time left until the first token is
    due and the goal for each later one, 0 for none.
    """

    num_tokens: int
    num_remaining: int
    hits: Mapping[str, int]
    alone: bool = False
    num_expected: int = 256
    priority: int = 0
    held_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    fetches: Mapping[str, Fetch] | None = None

    def uncached(self, worker: Worker) -> int:
        """Return the number of prompt tokens to compute: at least the last one, whose logits are needed."""
        left = self.num_tokens - (self.hits.get(worker.address, 0) if self.hits else 0)
        return left if left > 1 else 1

    def prompt(self, worker: Worker) -> StepShape:
        """Return the part of the prompt to compute, without fetched blocks."""
        start = self.num_tokens - self.uncached(worker)
        if (fetch := self.fetch(worker)) is not None:
            start = max(start, min(fetch.end, self.num_tokens - 1))
        return StepShape.of_prompt(start, self.num_tokens)

    def fetch(self, worker: Worker) -> Fetch | None:
        """Return what the worker fetches before it computes the rest."""
        return self.fetches.get(worker.address) if self.fetches else None

    def fetch_s(self, worker: Worker) -> float:
        """Return the time of that fetch in seconds; 0 without one."""
        fetch = self.fetch(worker)
        return fetch.seconds if fetch is not None else 0.0
