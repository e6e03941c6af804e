"""A request as routing weighs it, with what a worker fetches of its prompt from a disk or a peer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from common.latency import StepShape
from common.wire.messages import KVPeer
from router.fleet import Worker


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """The worker has the prompt's first `end` tokens after `seconds`.

    `peer` lends them, at the control address `lender`, which is busy with that for `lending_s`; None: they come from
    the worker's own disk.
    """

    end: int
    seconds: float
    peer: KVPeer | None = None
    lender: str = ""
    lending_s: float = 0.0


NO_HITS: Mapping[str, int] = MappingProxyType({})


class RequestShape(msgspec.Struct, frozen=True, gc=False):
    """A request as it is weighed. `hits`: prompt tokens that a worker has cached, by its address. `fetches`: what a
    worker that computes the prompt takes from its disk or from a peer.

    `alone`: the worker that computes the prompt also makes the whole answer. Of the `num_remaining` tokens that the
    answer may have, `num_expected` are likely. Prompts of lower `priority` do not delay it; those that the router holds
    take `held_s` seconds of each prefill worker before it. Its first token is due in `ttft_s` seconds, each later one
    in `tpot_s`; 0: no goal.
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
        """Prompt tokens that the worker must compute: at least the last one, whose logits are needed."""
        left = self.num_tokens - (self.hits.get(worker.address, 0) if self.hits else 0)
        return left if left > 1 else 1

    def prompt(self, worker: Worker) -> StepShape:
        """The same, as what a step computes, without what is taken from a disk or a peer."""
        start = self.num_tokens - self.uncached(worker)
        if (fetch := self.fetch(worker)) is not None:
            start = max(start, min(fetch.end, self.num_tokens - 1))
        return StepShape.of_prompt(start, self.num_tokens)

    def fetch(self, worker: Worker) -> Fetch | None:
        """What the worker takes from a disk or a peer before it computes the rest."""
        return self.fetches.get(worker.address) if self.fetches else None

    def fetch_s(self, worker: Worker) -> float:
        """Seconds of that."""
        fetch = self.fetch(worker)
        return fetch.seconds if fetch is not None else 0.0
