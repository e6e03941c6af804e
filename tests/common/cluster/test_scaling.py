"""What autoscalers read of a worker."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.cluster.scaling import ASSUMED_TOKENS_PER_S, DecodeLoad, backlog_s, pressure, unblocked_share
from common.engine.kv.block_pool import BlockCounts
from common.engine.worker.engine import EngineStatus
from common.engine.worker.metrics import WorkerMetrics
from common.latency.step_model import StepModel
from common.observe.averages import RecentQuantile


def test_a_backlog_is_time() -> None:
    assert backlog_s(0, 0.0) == backlog_s(0, 500.0) == 0.0
    assert backlog_s(1500, 500.0) == 3.0
    assert backlog_s(1500, 0.0) == 1500 / ASSUMED_TOKENS_PER_S


MODEL = StepModel(fixed_s=0.02, row_s=0.001, context_s=1e-6, num_steps=50)
"""A row with 1,000 tokens of context takes 2 ms."""


def work(kv_usage: float, running: int, waiting: int = 0, model: StepModel = MODEL) -> DecodeLoad:
    return DecodeLoad(kv_usage, running, waiting, running, 1000 * running, model)


def test_pressure_is_the_worse_of_memory_and_speed() -> None:
    assert pressure(work(0.4, 10), 0.0) == 0.5
    assert pressure(work(0.2, 10), 0.08) == pytest.approx(250 / 375), "tokens a second"
    assert pressure(work(0.4, 45), 0.08) == pytest.approx(1.5), "rows, behind the largest step within the goal"
    assert pressure(work(1.0, 24), 0.0) == 1.25


def test_what_waits_counts_like_what_runs() -> None:
    assert pressure(work(0.8, 10, waiting=10), 0.0) == pytest.approx(2.0)
    assert pressure(work(0.1, 10, waiting=20), 0.08) == pytest.approx(1.0)


def test_a_goal_that_a_lone_row_misses_does_not_fill_an_idle_worker() -> None:
    """A lone row takes 22 ms. The pool grows for a quarter more, not for what no number of workers gives."""
    assert pressure(work(0.0, 0), 0.01) == 0.0
    assert pressure(work(0.01, 1), 0.01) < 0.5
    assert pressure(work(0.1, 8), 0.01) == pytest.approx(8 / 3.75)


def test_without_a_model_pressure_is_memory() -> None:
    assert pressure(work(0.4, 60, model=StepModel()), 0.05) == 0.5
    assert pressure(work(0.0, 0, model=StepModel(token_s=1e-4, num_steps=9)), 0.05) == 0.0, "rows that take no time"


def test_prompts_behind_a_full_decode_pool_ask_for_no_prefill_worker() -> None:
    assert unblocked_share(0.3, 4, 0) == unblocked_share(0.0, 0, 0) == 1.0
    assert unblocked_share(0.9, 0, 30) == pytest.approx(0.1), "all memory is held by computed prompts"
    assert unblocked_share(0.4, 6, 2) == pytest.approx(0.9)


def test_a_recent_quantile_is_right_to_five_percent() -> None:
    source, recent = random.Random(1), RecentQuantile(60.0)
    values = [source.lognormvariate(-3, 1) for _ in range(2000)]
    for index, value in enumerate(values):
        recent.observe(value, 100.0 + index / 100)
    for share in (0.05, 0.5, 0.95, 1.0):
        true = sorted(values)[max(0, int(share * len(values)) - 1)]
        assert true <= recent.quantile(share, 120.0) * 1.001 <= true * 1.06


def test_a_recent_quantile_forgets() -> None:
    recent = RecentQuantile(60.0)
    assert recent.quantile(0.95, 0.0) == 0.0
    recent.observe(2.0, 5.0)
    recent.observe(0.1, 45.0)
    assert recent.quantile(1.0, 50.0) == pytest.approx(2.0, rel=0.05)
    assert recent.quantile(1.0, 70.0) == pytest.approx(0.1, rel=0.05)
    assert recent.quantile(1.0, 500.0) == 0.0
    recent.observe(1e9, 500.0)
    recent.observe(0.0, 500.0)
    assert recent.quantile(0.5, 500.0) == pytest.approx(1e-5)


def gauges(role: str, status: EngineStatus, slo_tpot_s: float = 0.0) -> dict[str, float]:
    metrics = WorkerMetrics("m", "w", lambda: status, role=role, slo_tpot_s=slo_tpot_s)
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels.keys() - {"model_name", "engine"}
    }


STATUS = EngineStatus(
    num_running=2,
    num_waiting=3,
    num_transferring=4,
    num_waiting_tokens=900,
    blocks=BlockCounts(free=40, cached=20, owned=60),
    full_tokens_per_s=300.0,
)


def test_a_prefill_worker_tells_its_backlog() -> None:
    found = gauges("prefill", STATUS)
    assert found["diptych_prefill_backlog_seconds"] == pytest.approx(3.0 * (1 - 0.5 * 4 / 6))
    assert found["diptych_active_requests"] == 9
    assert "diptych_decode_pressure" not in found
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (2, 3)
    assert gauges("prefill", EngineStatus())["diptych_prefill_backlog_seconds"] == 0.0


def test_a_decode_worker_tells_its_pressure() -> None:
    found = gauges("decode", STATUS)
    assert found["diptych_decode_pressure"] == pytest.approx(0.625 * 1.5), "three wait beside six"
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert "diptych_prefill_backlog_seconds" not in found
    slow = replace(STATUS, num_context_tokens=2000, step_model=MODEL)
    assert gauges("decode", slow, slo_tpot_s=0.03)["diptych_decode_pressure"] == pytest.approx(9 / 5)
    assert gauges("decode", EngineStatus(), slo_tpot_s=0.1)["diptych_decode_pressure"] == 0.0


def test_pinned_memory_is_what_it_is_at_each_scrape() -> None:
    metrics, found = WorkerMetrics("m", "w", lambda: STATUS, role="decode"), iter((4096, 8192))
    metrics.show_pinned(lambda: next(found))
    for expected in ("4096.0", "8192.0"):
        line = f'diptych_pinned_bytes{{engine="w",model_name="m"}} {expected}'
        assert line in generate_latest(metrics.registry).decode()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_caches_shape_is_told_as_vllm_does(role: str) -> None:
    metrics = WorkerMetrics("m", "w", lambda: STATUS, role=role)
    metrics.describe_cache(16, 120, "fp8")
    assert (
        'vllm:cache_config_info{block_size="16",cache_dtype="fp8",engine="w",model_name="m",num_gpu_blocks="120"} 1.0'
        in generate_latest(metrics.registry).decode()
    )
