"""What the router keeps of its requests is bounded in memory and age, and forgets abandoned ones."""

from __future__ import annotations

import gc
import time

from common.wire import SamplingParams
from router.access import ClientRequest
from router.access.keys import ANONYMOUS
from router.dispatch import GenerationRequest, Step, Trail
from router.dispatch.trail import MAX_STEPS
from router.generation.choice import AnswerChoice
from router.generation.request_history import MAX_AGE_S, MAX_CHOICES, REQUEST_BYTES, RequestHistory
from router.generation.request_log import RequestLog
from router.observe import RouterMetrics


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def log_of(history: RequestHistory, name: str, trail: Trail | None = None, began: float = 1000.0) -> RequestLog:
    client = ClientRequest(name, "POST", "/v1/completions", "", ANONYMOUS)
    client.began = began
    log = RequestLog(RouterMetrics("m", None), client, history, id=f"cmpl-{name}")
    request = GenerationRequest("r", [1], SamplingParams(max_tokens=1), trail=trail)
    log.choices = [AnswerChoice(0, 0, request, None, None)]  # type: ignore[arg-type]
    return log


def end(history: RequestHistory, log: RequestLog, ended: float) -> None:
    from msgspec.structs import replace

    history.ended(log, replace(log.record(), ended=ended))


def test_the_oldest_go_when_memory_or_time_is_over() -> None:
    clock = Clock()
    history = RequestHistory(max_bytes=3 * REQUEST_BYTES, clock=clock)
    for number in range(5):
        end(history, log_of(history, str(number)), clock.now)
    assert len(history) == 3
    assert [one.id for name in "01234" for one in history.find(name)] == ["cmpl-2", "cmpl-3", "cmpl-4"]
    clock.now += MAX_AGE_S + 1
    assert not list(history.find("4"))
    end(history, log_of(history, "new"), clock.now)
    assert len(history) == 1


def test_only_some_choices_are_kept_and_all_are_counted() -> None:
    history = RequestHistory(clock=Clock())
    log = log_of(history, "many")
    log.choices *= 100
    end(history, log, 1000.0)
    (entry,) = history.find("many")
    assert (entry.num_choices, len(entry.choices)) == (100, MAX_CHOICES)
    assert len(history._ended[0][0].record.choices) == MAX_CHOICES


def test_an_abandoned_request_does_not_stay() -> None:
    history = RequestHistory()
    log = log_of(history, "gone")
    assert [one.is_running for one in history.find("gone")] == [True]
    del log
    gc.collect()
    assert not list(history.find("gone"))


def test_a_trail_is_bounded_and_shown_while_it_grows() -> None:
    history, trail = RequestHistory(), Trail()
    log = log_of(history, "long", trail)
    for number in range(MAX_STEPS + 2):
        trail.add(Step(float(number), "failed"))
    (entry,) = history.find("cmpl-long-0")
    assert (len(entry.choices[0].steps), entry.choices[0].num_omitted_steps) == (MAX_STEPS, 2)
    end(history, log, time.perf_counter())
    assert [one.is_running for one in history.find("long")] == [False]
