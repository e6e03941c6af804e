"""Collects the facts of a request and writes its record at the end. The log line of a request:

12:00:01.250 INFO    router  request  request_id=9d1c path=/v1/completions status=200 key=alice id=cmpl-7f prompt=1900
    cached=1024 output=64 finish=length ttft_ms=93.1 queue_ms=2.1 prefill_ms=80.2 transfer_ms=9.7 exposed_ms=1.2
    decode_ms=812 prefill_worker=prefill-0 decode_worker=decode-1 attempts=1 preemptions=0 drafted=30 accepted=21
    total_ms=907
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config import DEFAULT
from common.errors import RequestError
from router.access import ClientRequest
from router.generation.choice import AnswerChoice
from router.generation.request_history import MAX_ERROR_CHARS, RequestHistory
from router.generation.tracing import RequestTrace
from router.observe import RequestRecord, RouterMetrics
from router.policy import Forecast
from router.request.errors import CLIENT_CLOSED, loggable

log = logging.getLogger(__name__)


@dataclass
class RequestLog:
    """The facts of one request to a generation endpoint. `end` must be called once.

    `release_model` ends the use of a model that was loaded on demand.
    """

    metrics: RouterMetrics
    client_request: ClientRequest
    history: RequestHistory
    trace: RequestTrace | None = None
    id: str = ""
    model: str = ""
    num_prompt_tokens: int = 0
    request_class: str = DEFAULT
    choices: Sequence[AnswerChoice] = ()
    status: int = 200
    error: RequestError | None = None
    release_model: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.history.began(self)

    def fail(self, error: RequestError) -> None:
        """Record that the answer is, or ends in, an error."""
        self.status, self.error = error.status, error.with_traceback(None)
        # Tracebacks refer to frames that hold this log and the body: a reference cycle that is rarely collected.
        error.__cause__ = error.__context__ = None

    def client_gone(self) -> None:
        """Record that the client disconnected before its answer was complete."""
        self.status = CLIENT_CLOSED

    def end(self) -> None:
        """Pass the record to metrics, history, audit log, log and trace."""
        if self.release_model is not None:
            self.release_model()
        record = self.record()
        self.history.ended(self, record)
        self.metrics.observe_request(record)
        self.client_request.answered(record)
        ignored_tools = (
            {"tools_left_out": ",".join(self.client_request.ignored_tools)} if self.client_request.ignored_tools else {}
        )
        log.info("request", extra=_fields(record) | ignored_tools)
        if self.trace is not None:
            self.trace.end(record)

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

    def record(self) -> RequestRecord:
        """Return the record of the request so far."""
        return RequestRecord(
            request_id=self.client_request.request_id,
            path=self.client_request.path,
            began=self.client_request.began,
            ended=time.perf_counter(),
            status=self.status,
            key=self.client_request.key.name,
            id=self.id,
            model=self.model,
            error=self.error,
            client_left=self.status == CLIENT_CLOSED,
            num_prompt_tokens=self.num_prompt_tokens,
            request_class=self.request_class,
            num_cached_tokens=self.num_cached_tokens,
            choices=tuple(choice.record() for choice in self.choices),
        )


def _fields(record: RequestRecord) -> dict[str, object]:
    """Return the fields of the log line, in chronological order."""
    fields: dict[str, object] = {"request_id": record.request_id, "path": record.path, "status": record.status}
    if record.key:
        fields["key"] = record.key
    if record.request_class != DEFAULT:
        fields["class"] = record.request_class
    if record.id:
        fields["id"] = record.id
    if record.error is not None:
        fields |= {"error": record.error_name, "reason": loggable(record.error)[:MAX_ERROR_CHARS]}
    if record.choices:
        fields |= {"prompt": record.num_prompt_tokens, "cached": record.num_cached_tokens}
        fields |= {"output": record.num_output_tokens, "finish": record.finish_reason or "none"}
        if len(record.choices) > 1:
            fields["choices"] = len(record.choices)
        if record.ttft_s is not None:
            fields["ttft_ms"] = record.ttft_s * 1e3
        fields |= _phases(record)
    fields["total_ms"] = (record.ended - record.began) * 1e3
    return fields


def _phases(record: RequestRecord) -> dict[str, object]:
    """Return the phase durations of the first choice that workers reported on."""
    for choice in record.choices:
        if (line := choice.timeline) is not None:
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
                **_drafts(record),
                **_predicted(line.forecast),
            }
    return {}


def _drafts(record: RequestRecord) -> dict[str, object]:
    """Return the draft token counts of all choices; {} if there were none."""
    drafts = [choice.timeline.drafts for choice in record.choices if choice.timeline is not None]
    if not (num_tokens := sum(each.num_tokens for each in drafts)):
        return {}
    return {"drafted": num_tokens, "accepted": sum(each.num_accepted for each in drafts)}


def _predicted(forecast: Forecast) -> dict[str, object]:
    """Return the router's predictions for the workers it chose, by component; {} without measurements."""
    if not forecast.is_known:
        return {}
    return {
        "predicted_ttft_ms": forecast.ttft_s * 1e3,
        "predicted_wait_ms": forecast.wait_s * 1e3,
        "predicted_fetch_ms": forecast.fetch_s * 1e3,
        "predicted_lag_ms": forecast.lag_s * 1e3,
        "predicted_place_ms": forecast.place_s * 1e3,
        "predicted_token_ms": forecast.token_s * 1e3,
        "predicted_step_ms": forecast.model_token_s * 1e3,
        "predicted_stall_ms": forecast.stall_s * 1e3,
        "predicted_transfer_ms": forecast.transfer_s * 1e3,
        "delays_others_ms": forecast.delay_s * 1e3,
    }
