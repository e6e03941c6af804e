"""One line a request, at its end: its life, in the order in which it happened.

12:00:01.250 INFO    router  request  request_id=9d1c path=/v1/completions status=200 key=alice id=cmpl-7f prompt=1900
    cached=1024 output=64 finish=length ttft_ms=93.1 queue_ms=2.1 prefill_ms=80.2 transfer_ms=9.7 exposed_ms=1.2
    decode_ms=812 prefill_worker=prefill-0 decode_worker=decode-1 attempts=1 preemptions=0 total_ms=907
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import RequestError
from router.auth.visit import Visit
from router.generation.choice import Choice
from router.observe.metrics import RouterMetrics
from router.request.errors import CLIENT_CLOSED, loggable

log = logging.getLogger(__name__)


class Trace(Protocol):
    """What else is told of a request's end."""

    def end(self, log: RequestLog, ended: float) -> None:
        """The request ended at `ended` (perf_counter seconds); `log` has all that is known of it."""
        ...


@dataclass
class RequestLog:
    """What is known of one request to a generation endpoint. `end` counts it, writes its line and its trace, once.

    `began` is perf_counter seconds; what is known in the end is noted in `visit`, too.
    """

    metrics: RouterMetrics
    path: str
    visit: Visit
    trace: Trace | None = None
    id: str = ""
    model: str = ""
    stream: bool = False
    num_prompt_tokens: int = 0
    choices: Sequence[Choice] = ()
    status: int = 200
    error: RequestError | None = None
    _ended: bool = False

    def fail(self, error: RequestError) -> None:
        """The answer is, or ends in, an error."""
        self.status, self.error = error.status, error

    def client_gone(self) -> None:
        """The client left before its answer was complete."""
        self.status = CLIENT_CLOSED

    def end(self) -> None:
        """Count and log."""
        if self._ended:
            return
        self._ended = True
        self._note()
        metrics = self.metrics
        metrics.count_request(self.path, self.status)
        if self.error is not None:
            metrics.count_error(self.error.status, self.error.type)
        elif self.status == CLIENT_CLOSED:
            metrics.count_error(CLIENT_CLOSED, "client_closed")
        if any(choice.num_tokens for choice in self.choices):
            metrics.prompt_tokens.inc(self.num_prompt_tokens)
            metrics.cached_tokens.inc(self.num_cached_tokens)
            metrics.generation_tokens.inc(self.num_output_tokens)
            if self.visit.key.name:
                metrics.count_key_tokens(self.visit.key.name, self.num_prompt_tokens, self.num_output_tokens)
        for choice in self.choices:
            unfinished = "abort" if self.status == CLIENT_CLOSED else "error"
            metrics.count_finished(choice.finish_reason or unfinished)
            if choice.finish_reason:
                times = (self.began, choice.first_at, choice.last_at)
                metrics.observe_end(times, choice.num_tokens, choice.timeline)
        log.info("request", extra=self._fields())
        if self.trace is not None:
            self.trace.end(self, time.perf_counter())

    @property
    def began(self) -> float:
        return self.visit.began

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Cached prompt tokens; a prompt with several choices counts once."""
        cached: dict[int, int] = {}
        for choice in self.choices:
            cached.setdefault(choice.prompt, choice.num_cached_tokens)
        return sum(cached.values())

    def _note(self) -> None:
        visit = self.visit
        visit.status, visit.model = self.status, self.model
        visit.num_prompt_tokens, visit.num_output_tokens = self.num_prompt_tokens, self.num_output_tokens
        visit.finish_reason = self.choices[0].finish_reason if self.choices else ""
        visit.error = type(self.error).__name__ if self.error is not None else ""

    def _fields(self) -> dict[str, object]:
        visit = self.visit
        fields: dict[str, object] = {"request_id": visit.request_id, "path": self.path, "status": self.status}
        if visit.key.name:
            fields["key"] = visit.key.name
        if self.id:
            fields["id"] = self.id
        if self.error is not None:
            fields |= {"error": type(self.error).__name__, "reason": loggable(self.error)[:200]}
        if self.choices:
            fields |= {"prompt": self.num_prompt_tokens, "cached": self.num_cached_tokens}
            fields |= {"output": self.num_output_tokens, "finish": self.choices[0].finish_reason or "none"}
            if len(self.choices) > 1:
                fields["choices"] = len(self.choices)
            first = min((choice.first_at for choice in self.choices if choice.first_at), default=0.0)
            if first:
                fields["ttft_ms"] = (first - self.began) * 1e3
            fields |= self._phases()
        fields["total_ms"] = (time.perf_counter() - self.began) * 1e3
        return fields

    def _phases(self) -> dict[str, object]:
        """Of the first choice that the workers told us about."""
        choice = next((choice for choice in self.choices if choice.timeline is not None), None)
        if choice is None or (line := choice.timeline) is None:
            return {}
        return {
            "queue_ms": line.queue_s * 1e3,
            "prefill_ms": line.prefill_s * 1e3,
            "transfer_ms": line.transfer_s * 1e3,
            "exposed_ms": line.exposed_transfer_s * 1e3,
            "decode_ms": (line.decode_s or choice.last_at - choice.first_at) * 1e3,
            "prefill_worker": line.prefill_worker or "none",
            "decode_worker": line.decode_worker or "none",
            "attempts": line.num_attempts,
            "preemptions": line.num_preemptions,
        }
