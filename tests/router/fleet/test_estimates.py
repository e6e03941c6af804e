"""How long the prompts that a worker has take from now on, as the router sees it between two heartbeats."""

import pytest

from common.latency.step_model import StepModel, StepShape
from router.fleet.estimates import LEAST_S, MOST_S, FirstTokenLag
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker
from router.policy.forecast import forecast_prefill, queued_s, step_tokens
from router.policy.request_shape import NO_HITS, RequestShape

from ...fake_worker import heartbeat_of, hello_of

MODEL = StepModel(fixed_s=0.01, token_s=1e-3, num_steps=100)
PROMPT = StepShape.of_prompt(0, 400)


def fleet(**beat: object) -> tuple[WorkerRegistry, Worker]:
    """A registry with one prefill worker, which reported at 0."""
    registry = WorkerRegistry(["p0"], [], worker_timeout_s=2.0)
    registry.on_hello("p0", hello_of("p0", "prefill", max_step_tokens=512), 0.0)
    registry.on_heartbeat("p0", heartbeat_of("p0", step_model=MODEL, **beat), 0.0)
    return registry, registry.workers["p0"]


def test_prompts_that_were_sent_are_computed_meanwhile() -> None:
    registry, worker = fleet()
    first, second = [registry.book("p0", 10.0, prompt=PROMPT, num_blocks=1) for _ in range(2)]
    both_s, one_s = (MODEL.steps_s(StepShape.sum([PROMPT] * num), step_tokens(worker)) for num in (2, 1))
    assert queued_s(worker, 10.0) == pytest.approx(both_s)
    assert queued_s(worker, 10.0 + one_s / 2) == pytest.approx(both_s - one_s / 2)
    assert queued_s(worker, 10.0 + 2 * both_s) == 0.0, "how late they are is for `observed_s` to say"
    registry.release(registry.computed(first, 10.0 + one_s))
    assert queued_s(worker, 10.0 + one_s) == pytest.approx(one_s), "the other one begins now"
    registry.release(second)
    assert queued_s(worker, 10.0 + one_s) == 0.0


def test_what_was_reported_comes_before_what_was_sent_since() -> None:
    registry, worker = fleet(waiting_s=2.0)
    registry.book("p0", 0.5, prompt=PROMPT, num_blocks=1)
    one_s = MODEL.steps_s(PROMPT, step_tokens(worker))
    assert queued_s(worker, 1.0) == pytest.approx(1.0 + one_s)
    assert queued_s(worker, 2.0 + one_s / 2) == pytest.approx(one_s / 2)


def test_what_a_report_leaves_out_begins_behind_it() -> None:
    registry, worker = fleet()
    registry.book("p0", 5.0, prompt=PROMPT, num_blocks=1)
    one_s = MODEL.steps_s(PROMPT, step_tokens(worker))
    registry.on_heartbeat("p0", heartbeat_of("p0", step_model=MODEL), 5.1)
    assert queued_s(worker, 5.1) == pytest.approx(one_s), "it is on its way to the worker"


def test_prompts_that_pass_each_other_make_no_worker_slow() -> None:
    registry, worker = fleet()
    for _ in range(50):
        for times in (4.0, 0.25):
            registry.on_first_token("p0", times)
    assert worker.estimates.slowness == pytest.approx(1.0, abs=0.2)
    for _ in range(50):
        registry.on_first_token("p0", 3.0)
    assert worker.estimates.slowness == pytest.approx(3.0, rel=0.05)


def test_the_lag_of_first_tokens_follows_prompts_that_wait_for_none() -> None:
    lag = FirstTokenLag()
    assert lag.seconds == 0.0
    lag.observe(measured_s=0.055, predicted_s=0.05)
    assert lag.seconds == pytest.approx(0.005), "the first is taken whole"
    for _ in range(300):
        lag.observe(measured_s=0.060, predicted_s=0.05)
        lag.observe(measured_s=0.090, predicted_s=0.05)
    assert lag.seconds == pytest.approx(0.02, rel=0.05), "a geometric mean: a long one says no more than a short one"
    for measured_s, bound in ((0.0, LEAST_S), (1e9, MOST_S)):
        for _ in range(600):
            lag.observe(measured_s, predicted_s=0.05)
        assert lag.seconds == pytest.approx(bound, rel=0.01)


def test_every_worker_of_a_role_is_predicted_with_its_lag() -> None:
    registry, worker = fleet()
    registry.add("p1", "prefill")
    registry.on_hello("p1", hello_of("p1", "prefill", max_step_tokens=512), 0.0)
    registry.on_heartbeat("p1", heartbeat_of("p1", step_model=MODEL), 0.0)
    shape = RequestShape(100, 100, NO_HITS)
    before = forecast_prefill(worker, shape, 0.0)
    assert before.lag_s == 0.0
    for _ in range(2):
        registry.on_lone_prompt("prefill", before.prompt_s + 0.02, before.prompt_s)
        registry.on_lone_prompt("decode", before.prompt_s + 0.5, before.prompt_s)
    registry.sweep(0.1)
    for each in registry.workers.values():
        after = forecast_prefill(each, shape, 0.0)
        assert (after.wait_s, after.prompt_s) == (before.wait_s, before.prompt_s)
        assert after.lag_s == pytest.approx(0.02) and after.ttft_s == pytest.approx(before.ttft_s + 0.02)
