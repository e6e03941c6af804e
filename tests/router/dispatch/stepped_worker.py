"""A scripted worker that moves when a state machine says so, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from common.wire.messages import KVTarget, Message

from ...fake_worker import FakeWorker, next_token

KV = dict[tuple[str, int, str, int], list[int]]
ROUTER = b"router"
ROUNDINGS = range(3)


def follows(prompt: list[int], tokens: list[int]) -> bool:
    """Whether workers of one model may have made these tokens, each behind those before it."""
    weights = {token // 10_000 for token in tokens}
    known = [*prompt, *tokens]
    possible = (
        {next_token(known[:i], r, w) for r in ROUNDINGS for w in weights} for i in range(len(prompt), len(known))
    )
    return len(weights) <= 1 and all(token in choices for token, choices in zip(tokens, possible, strict=True))


class SteppedWorker(FakeWorker):
    """A scripted worker whose messages travel, and whose requests advance, when the machine says so."""

    def __init__(self, role: str, address: str, kv: KV, rounding: int, weights: int) -> None:
        identity = {"fingerprint": f"{weights}", "weights": f"{weights}", "max_num_seqs": 8}
        super().__init__(address.rpartition(":")[2], role, **identity)
        self.address, self.kv = address, kv
        self.script = partial(next_token, rounding=rounding, weights=weights)
        self.alive = self.awake = True
        self.inbox, self.outbox = deque[Message](), deque[Message]()

    def send(self, router: bytes, message: Message) -> None:
        self.outbox.append(message)

    def ship(self, request_id: str, attempt: int, target: KVTarget, tokens: list[int]) -> None:
        self.kv[(request_id, attempt, target.worker_id, target.epoch)] = list(tokens)

    def read(self) -> None:
        """Take the next message from the router."""
        if self.awake and self.inbox:
            self.take(ROUTER, self.inbox.popleft())

    def work(self, number: int) -> None:
        """Advance one request by a token, or by its hand-over, which fails at times."""
        if not self.awake or not self.jobs:
            return
        job = list(self.jobs.values())[number % len(self.jobs)]
        if job.tokens is None:
            key = (job.request.request_id, job.request.attempt, self.worker_id, self.epoch)
            if key not in self.kv:
                return
            job.tokens = list(self.kv[key])
        if job.order is None or number % 3 == 0:
            self.advance(job)
        elif number % 3 == 1:
            self.fail(ROUTER, job.order)
            job.order = None
        else:
            self.hand_over(job)

    def refuse(self, number: int) -> None:
        """Give a request up."""
        if self.awake and self.jobs:
            self.fail(ROUTER, self.jobs.pop(list(self.jobs)[number % len(self.jobs)]).request)

    def go_on(self) -> None:
        """Say of every request that it makes progress."""
        for job in self.jobs.values() if self.awake else ():
            self.output(ROUTER, job.request, job.index, [])

    def forget(self) -> None:
        self.jobs.clear()
        self.inbox.clear()
        self.outbox.clear()


@dataclass
class Asked:
    """A request, what came of it, and how it ended."""

    prompt: list[int]
    count: int
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
