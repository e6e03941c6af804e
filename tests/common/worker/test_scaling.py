"""What autoscalers read of a worker."""

from __future__ import annotations

import random

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.kv.block_pool import BlockCounts
from common.observe.recent_quantile import RecentQuantile
from common.worker.engine import EngineStatus
from common.worker.metrics import WorkerMetrics
from common.worker.scaling import ASSUMED_TOKENS_PER_S, backlog_s, pressure


def test_a_backlog_is_time() -> None:
    assert backlog_s(0, 0.0) == backlog_s(0, 500.0) == 0.0
    assert backlog_s(1500, 500.0) == 3.0
    assert backlog_s(1500, 0.0) == 1500 / ASSUMED_TOKENS_PER_S


def test_pressure_is_the_worse_of_memory_and_speed() -> None:
    assert pressure(0.4, 0.02, 0.0) == 0.5
    assert pressure(0.4, 0.02, 0.05) == 0.5
    assert pressure(0.4, 0.04, 0.05) == pytest.approx(0.8)
    assert pressure(1.0, 0.0, 0.05) == 1.25


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


def gauges(role: str, status: EngineStatus, steps: tuple[float, ...] = (), slo_tpot_s: float = 0.0) -> dict[str, float]:
    metrics = WorkerMetrics("m", "w", lambda: status, role=role, slo_tpot_s=slo_tpot_s)
    for step_s in steps:
        metrics.step_seconds.observe(step_s)
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
    assert (found["diptych_prefill_backlog_seconds"], found["diptych_active_requests"]) == (3.0, 9)
    assert "diptych_decode_pressure" not in found
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (2, 3)
    assert gauges("prefill", EngineStatus())["diptych_prefill_backlog_seconds"] == 0.0


def test_a_decode_worker_tells_its_pressure() -> None:
    found = gauges("decode", STATUS)
    assert (found["diptych_decode_pressure"], found["vllm:kv_cache_usage_perc"]) == (pytest.approx(0.625), 0.5)
    assert "diptych_prefill_backlog_seconds" not in found
    slow = gauges("decode", STATUS, steps=(0.01,) * 90 + (0.09,) * 10, slo_tpot_s=0.1)
    assert slow["diptych_decode_pressure"] == pytest.approx(0.9, rel=0.06)
    assert slow["diptych_engine_step_seconds_count"] == 100
    assert gauges("decode", EngineStatus(), slo_tpot_s=0.1)["diptych_decode_pressure"] == 0.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_caches_shape_is_told_as_vllm_does(role: str) -> None:
    metrics = WorkerMetrics("m", "w", lambda: STATUS, role=role)
    metrics.describe_cache(16, 120, "fp8")
    assert (
        'vllm:cache_config_info{block_size="16",cache_dtype="fp8",engine="w",model_name="m",num_gpu_blocks="120"} 1.0'
        in generate_latest(metrics.registry).decode()
    )
