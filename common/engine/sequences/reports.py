"""Reports to routers: tokens, prompt logprobs, pooled prompts and failures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from common.wire import TokenLogprobs
from common.wire.messages import (
    MAX_OUTPUTS,
    Message,
    PooledOutput,
    PromptLogprobs,
    RequestFailed,
    TokenDelta,
    TokenOutput,
)

MAX_ALTERNATIVES = 500_000
"""Maximum number of alternatives in a message of several requests: about 8 MB, half of the wire limit."""
MAX_WHY_CHARS = 4000
"""Maximum length of a reason, in characters. The wire limit is 4096."""


class ReportedRequest(Protocol):
    """A request on a worker."""

    @property
    def router(self) -> bytes: ...
    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class Reports:
    """Collects token deltas per router until `flush`. `emit(router, message)` queues a message."""

    def __init__(self, identity: tuple[str, int], emit: Callable[[bytes, Message], None]) -> None:
        """`identity`: the worker's ID and boot epoch."""
        self._worker_id, self._epoch = identity
        self._emit = emit
        self._deltas: dict[bytes, list[TokenDelta]] = defaultdict(list)

    def add_delta(self, router: bytes, delta: TokenDelta) -> None:
        self._deltas[router].append(delta)

    def flush(self) -> None:
        """Queue one `TokenOutput` per router that has deltas, or several if they exceed the limits of a message."""
        for router, deltas in self._deltas.items():
            for part in _within_messages(deltas):
                self._emit(router, TokenOutput(worker_id=self._worker_id, epoch=self._epoch, outputs=tuple(part)))
        self._deltas.clear()

    def report_prompt_logprobs(self, sequence: ReportedRequest, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Queue prompt logprobs for the tokens after `start`, immediately, before any token that follows."""
        message = PromptLogprobs(
            worker_id=self._worker_id,
            epoch=self._epoch,
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            start=start + 1,
            logprobs=tuple(logprobs),
        )
        self._emit(sequence.router, message)

    def report_pooled(self, sequence: ReportedRequest, values: bytes) -> None:
        """Queue the vector of a prompt, immediately, before the delta that ends its request."""
        message = PooledOutput(
            worker_id=self._worker_id,
            epoch=self._epoch,
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            values=values,
        )
        self._emit(sequence.router, message)

    def fail(self, router: bytes, request_id: str, attempt: int, phase: str, why: str, *, retryable: bool) -> None:
        """Queue the failure of a request."""
        failed = RequestFailed(
            worker_id=self._worker_id,
            request_id=request_id,
            attempt=attempt,
            phase=phase,
            message=why[:MAX_WHY_CHARS],
            retryable=retryable,
        )
        self._emit(router, failed)


def _within_messages(deltas: Sequence[TokenDelta]) -> Iterator[Sequence[TokenDelta]]:
    """Split the deltas into parts that fit in a message."""
    if len(deltas) <= MAX_OUTPUTS and not any(delta.logprobs for delta in deltas):
        yield deltas
        return
    part: list[TokenDelta] = []
    num_alternatives = 0
    for delta in deltas:
        more = sum(len(token.top) for token in delta.logprobs)
        if len(part) == MAX_OUTPUTS or (part and num_alternatives + more > MAX_ALTERNATIVES):
            yield part
            part, num_alternatives = [], 0
        part.append(delta)
        num_alternatives += more
    yield part
