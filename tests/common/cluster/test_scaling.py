"""What autoscalers read of a worker, and a closed loop: an autoscaler, pods that start late, requests that wait."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.cluster.scaling import (
    ASSUMED_TOKENS_PER_S,
    DecodeLoad,
    backlog_s,
    prefill_pressure,
    pressure,
    unblocked_share,
)
from common.engine.kv.block_pool import BlockCounts
from common.engine.worker.contract import EngineStatus
from common.engine.worker.metrics import WorkerMetrics
from common.latency.step_model import StepModel, StepShape
from common.observe.averages import RecentQuantile, RecentRate


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
    return gauges_of(WorkerMetrics("m", "w", lambda: status, role=role, slo_tpot_s=slo_tpot_s))


def gauges_of(metrics: WorkerMetrics) -> dict[str, float]:
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


def test_a_prefill_worker_tells_how_many_workers_its_prompts_fill() -> None:
    """Prompts of the last two minutes at its full rate, and what waits, in a minute."""
    metrics = WorkerMetrics("m", "w", lambda: STATUS, role="prefill")
    assert gauges_of(metrics)["diptych_prefill_pressure"] == pytest.approx(2.0 / 60.0)
    metrics.count_computed(18_000)
    found = gauges_of(metrics)
    assert found["diptych_prefill_pressure"] == pytest.approx(18_000 / 120.0 / 300.0 + 2.0 / 60.0)
    assert found["diptych_prompt_tokens_computed_total"] == 18_000
    assert prefill_pressure(1.0, 0.0) == 1.0 and prefill_pressure(1.0, 120.0) == 3.0


def test_a_rate_is_that_of_its_window() -> None:
    whole, young = RecentRate(120.0), RecentRate(120.0, from_start=True)
    for rate in (whole, young):
        assert rate.per_s(1000.0) == 0.0
        rate.add(60.0, 1030.0)
    assert (whole.per_s(1030.0), young.per_s(1030.0)) == (0.5, 2.0)
    assert whole.per_s(1115.0) == young.per_s(1125.0) == 0.5
    assert whole.per_s(1160.0) == young.per_s(1160.0) == 0.0


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


STEPS = StepModel(fixed_s=0.02, row_s=0.001, num_steps=99)
"""30 rows of a worker meet a goal of 50 ms."""
TICK_S, POLL_S, START_S, SETTLE_S = 1.0, 15.0, 60.0, 300.0
TARGET, NUM_TOKENS, MAX_PODS = 0.9, 400, 32


@dataclass
class DecodeLoop:
    """Requests share the ready pods evenly. The autoscaler wants ceil(sum / target), and shrinks to the most lately."""

    goal_s: float
    num_ready: int = 1
    rows: float = 0.0
    most_rows: float = 0.0
    starting: list[float] = field(default_factory=list)
    wishes: list[tuple[float, int]] = field(default_factory=list)
    history: list[int] = field(default_factory=list)

    @property
    def token_s(self) -> float:
        return STEPS.seconds(StepShape.of_rows(1, 0)) + STEPS.row_s * max(0.0, self.rows / self.num_ready - 1)

    def run(self, seconds: float, rate: float) -> None:
        for tick in range(int(seconds)):
            now = len(self.history) * TICK_S
            self.num_ready += sum(at <= now for at in self.starting)
            self.starting = [at for at in self.starting if at > now]
            self.rows += rate * TICK_S - self.rows * TICK_S / (NUM_TOKENS * self.token_s)
            self.most_rows = max(self.most_rows, self.rows)
            if tick % POLL_S == 0:
                self.poll(now)
            self.history.append(self.num_ready + len(self.starting))

    def poll(self, now: float) -> None:
        each = round(self.rows / self.num_ready)
        work = DecodeLoad(0.1, each, 0, each, 0, STEPS)
        wish = min(MAX_PODS, max(1, math.ceil(self.num_ready * pressure(work, self.goal_s) / TARGET)))
        self.wishes.append((now, wish))
        lasting = max(wish for at, wish in self.wishes if at > now - SETTLE_S)
        present = self.num_ready + len(self.starting)
        if wish > present:
            self.starting += [now + START_S] * (wish - present)
        elif lasting < self.num_ready and not self.starting:
            self.num_ready = lasting


def test_a_pool_that_starts_slowly_grows_once_by_what_is_missing() -> None:
    """80 rows at 50 ms: three pods of 30. While they start, four polls see the same full pod and what piles up."""
    loop = DecodeLoop(goal_s=0.05)
    loop.run(1200, rate=5.0)
    assert loop.history[-1] in (3, 4) and loop.token_s <= 0.05
    assert max(loop.history) <= math.ceil((loop.most_rows + 1) / 30 / TARGET), "what piled up, not a product of it"
    signs = [b > a for a, b in zip(loop.history, loop.history[1:], strict=False) if a != b]
    assert sum(a != b for a, b in zip(signs, signs[1:], strict=False)) <= 1, "up, then down, and no more"


def test_a_goal_near_the_time_of_a_lone_row_does_not_pin_an_idle_pool() -> None:
    """A lone row takes 21 of 25 ms, 0.84 of the goal, and the target is 0.9."""
    loop = DecodeLoop(goal_s=0.025)
    loop.run(600, rate=0.05)
    assert max(loop.history) == 1


def test_a_goal_out_of_reach_does_not_pin_the_pool_at_its_maximum() -> None:
    loop = DecodeLoop(goal_s=0.01)
    loop.run(900, rate=1.0)
    assert 1 <= loop.history[-1] <= 3


@pytest.mark.parametrize(("num_decode_rows", "grows"), [(8, "decode"), (400, "prefill")])
def test_the_pool_that_lacks_grows(num_decode_rows: int, grows: str) -> None:
    """Ten prompts a second come for five minutes. Either decode takes few of them, or prefill computes few."""
    waiting, held, running, decoding = 0.0, 0.0, 0.0, 0.0
    prompt_s, room = (0.02, 40) if grows == "decode" else (0.2, 40)
    for _ in range(300):
        waiting += 10
        running = min(waiting, 1 / prompt_s, room - held)
        waiting, held = waiting - running, held + running
        decoding -= decoding / 20
        taken = min(held, num_decode_rows - decoding)
        decoding, held = decoding + taken, held - taken
    usage = (held + running) / room
    share = unblocked_share(min(1.0, usage), int(running), int(held))
    prefill = math.ceil(backlog_s(waiting * 100 * share, 100 / prompt_s) / 20)
    work = DecodeLoad(decoding / num_decode_rows, int(decoding), int(held), int(decoding), 0, StepModel())
    decode = math.ceil(pressure(work, 0.0) / TARGET)
    assert (decode > 2, prefill > 2) == (grows == "decode", grows == "prefill")
