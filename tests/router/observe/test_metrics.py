from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from common.config import RequestClass
from router.dispatch.client import Prediction, RequestTimeline
from router.dispatch.load import DispatchLoad, WorkerLoad
from router.observe import metrics as subject
from router.observe.metrics import LoopHistogram, RouterMetrics
from router.observe.request_record import ChoiceRecord, RequestRecord

WORKER = WorkerLoad("tcp://127.0.0.1:1", "decode", "decode-0", "suspect", 3, 70, 90, 100, 2, 0.0, 0.0, 6, 7, 8)
LOAD = DispatchLoad(
    {"queue": 1, "decode": 4}, (WORKER,), {"decode": 2, "prefill": 1}, {"Overloaded": 3}, {"local": 9}, 5
)


def samples(metrics: RouterMetrics) -> dict[str, float]:
    """Values by name and by those labels that tell samples apart."""
    found = {}
    for family in text_string_to_metric_families(metrics.snapshot()().decode()):
        if family.name.startswith("process_"):  # named and labelled as every Prometheus client does
            continue
        for sample in family.samples:
            assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) == ("tiny", "router")
            found[" ".join([sample.name, *(value for _, value in sorted(sample.labels.items()))])] = sample.value
    return found


def answered(num_tokens: int, last_at: float, line: RequestTimeline | None, **fields: Any) -> RequestRecord:
    """A request of one choice, which came at 1.0 and had its first token at 1.5."""
    choice = ChoiceRecord(0, num_tokens, "stop", 1.5, last_at, line)
    return RequestRecord("r", "/v1/completions", began=1.0, ended=4.0, status=200, choices=(choice,), **fields)


def test_the_dispatcher_is_read_at_scrape_time() -> None:
    found = samples(RouterMetrics("tiny", lambda: LOAD))
    assert (found["diptych_requests_in_flight queue"], found["diptych_requests_in_flight decode"]) == (1, 4)
    assert (found["diptych_retries_total prefill"], found["diptych_takeovers_total"]) == (1, 2)
    assert (found["diptych_failures_total Overloaded"], found["diptych_placements_total local"]) == (3, 9)
    assert found["diptych_stale_deltas_total"] == 5
    assert found["diptych_worker_state decode suspect decode-0"] == 1
    worker = [found[f"diptych_worker_{name} decode decode-0"] for name in ("requests", "queued_tokens", "cuts_total")]
    assert worker == [2, 70, 8]


async def test_a_thread_renders_the_text_of_what_the_event_loop_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, int] = {}

    def load() -> DispatchLoad:
        threads["read"] = threading.get_ident()
        return LOAD

    def rendered(collector: Collector) -> bytes:
        threads["rendered"] = threading.get_ident()
        return generate_latest(collector)

    monkeypatch.setattr(subject, "generate_latest", rendered)
    metrics = RouterMetrics("tiny", load)
    metrics.count_key_request("a", 200)
    text = await metrics.text()
    assert b'diptych_key_requests_total{engine="router",key="a"' in text and b"diptych_asyncio_tasks" in text
    assert threads["read"] == threading.get_ident() != threads["rendered"]


def test_a_finished_sequence() -> None:
    metrics = RouterMetrics("tiny", lambda: LOAD)
    metrics.observe_request(answered(5, 3.5, RequestTimeline(queue_s=0.1, prefill_s=0.2, decode_s=2.0)))
    found = samples(metrics)
    assert found["vllm:e2e_request_latency_seconds_sum"] == 2.5
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 0.5
    assert found["vllm:request_decode_time_seconds_sum"] == 2.0
    assert found["vllm:request_success_total stop"] == 1


def test_predictions_at_admission_are_compared_with_what_came() -> None:
    classes = {"default": RequestClass(ttft_s=0.25, tpot_s=0.6)}
    metrics = RouterMetrics("tiny", lambda: LOAD, classes=classes)
    line = RequestTimeline(queue_s=0.1, prefill_s=0.2, decode_s=2.0)
    for admitted in (Prediction(0.2, 0.5), Prediction(0.3, 0.7), Prediction()):
        metrics.observe_request(answered(5, 3.5, msgspec.structs.replace(line, admitted=admitted)))
    found = {name: value for name, value in samples(metrics).items() if "goal_predictions_total" in name}
    assert sorted((name.split()[1:], value) for name, value in found.items()) == [
        (["default", "met", "met", "tpot"], 1),
        (["default", "met", "missed", "tpot"], 1),
        (["default", "missed", "met", "ttft"], 1),
        (["default", "missed", "missed", "ttft"], 1),
    ]


def test_what_a_key_did() -> None:
    metrics = RouterMetrics("tiny", lambda: LOAD)
    metrics.count_key_request("alice", 200)
    metrics.observe_request(answered(3, 3.5, None, key="alice", num_prompt_tokens=7))
    metrics.observe_request(answered(1, 1.5, None, key="alice", num_prompt_tokens=1))
    metrics.count_rate_limited("alice", "tokens")
    metrics.count_reload("tls_cert", ok=False)
    metrics.count_audit_dropped(4)
    found = samples(metrics)
    assert (found["diptych_key_tokens_total alice prompt"], found["diptych_key_tokens_total alice output"]) == (8, 4)
    assert found["diptych_key_requests_total alice 200"] == found["diptych_rate_limited_total alice tokens"] == 1
    assert found["diptych_reloads_total refused tls_cert"] == 1 and found["diptych_audit_dropped_total"] == 4


def test_a_single_token_has_no_time_per_output_token() -> None:
    metrics = RouterMetrics("tiny", lambda: LOAD)
    metrics.observe_request(answered(1, 1.5, None))
    assert samples(metrics)["vllm:request_time_per_output_token_seconds_count"] == 0


def test_tokens_that_come_together_share_the_gap() -> None:
    metrics = RouterMetrics("tiny", lambda: LOAD)
    metrics.observe_gap(0.4, 4)
    found = samples(metrics)
    assert (found["vllm:inter_token_latency_seconds_count"], found["vllm:inter_token_latency_seconds_sum"]) == (4, 0.4)


BUCKETS = (0.001, 0.05, 1.0, 60.0)
VALUES = (0.0, 0.001, 0.0011, 0.05, 0.7, 0.7, 60.0, 61.0)


def shown(registry: CollectorRegistry) -> tuple[list[str], dict[str, float]]:
    """Every line, and the values by name and labels but for the time of creation."""
    page = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = {f"{one.name}{sorted(one.labels.items())}": one.value for one in samples if "created" not in one.name}
    return [line.rsplit(" ", 1)[0] for line in page.splitlines()], found


def test_it_shows_what_prometheus_shows() -> None:
    ours, theirs, labels = CollectorRegistry(), CollectorRegistry(), {"model_name": "m", "engine": "router"}
    mine = LoopHistogram("vllm:some_seconds", "Some time", labels, BUCKETS)
    ours.register(mine)
    usual = Histogram("vllm:some_seconds", "Some time", list(labels), buckets=BUCKETS, registry=theirs)
    assert not any(shown(ours)[1].values())
    for value in VALUES:
        mine.observe(value)
        usual.labels(*labels.values()).observe(value)
    assert shown(ours) == shown(theirs)


def test_equal_values_count_at_once() -> None:
    one, many = (LoopHistogram("some_seconds", "Some time", {}, BUCKETS) for _ in range(2))
    for _ in range(4):
        one.observe(0.25)
    many.observe(0.25, 4)
    pages = []
    for histogram in (one, many):
        registry = CollectorRegistry()
        registry.register(histogram)
        pages.append(shown(registry))
    assert pages[0] == pages[1] and pages[0][1]["some_seconds_sum[]"] == 1.0
