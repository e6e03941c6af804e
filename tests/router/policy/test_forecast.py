"""When a new prompt has its turn: beside a worker that computes the shortest first, and by what a router has booked."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.latency.step_model import StepModel, StepShape
from router.fleet.booking import PromptSizes
from router.fleet.estimates import LEAST, MOST, TokenPace
from router.fleet.registry import WorkerRegistry
from router.policy.forecast import forecast_decode, forecast_prefill, shortest_first_wait_s
from router.policy.request_shape import NO_HITS, RequestShape

from ...fake_worker import heartbeat_of, hello_of

P, D = "tcp://p:1", "tcp://d:1"
BUDGET, TOKEN_S = 500, 1e-3
MODEL = StepModel(token_s=TOKEN_S, row_s=0.01, num_steps=500)


def computed_at(waiting: list[int], new: int) -> float:
    """When steps of `BUDGET` tokens have computed the last prompt of the size `new`, the shortest prompts first."""
    left, now = sorted([*waiting, new]), 0.0
    place = max(index for index, size in enumerate(left) if size == new)
    while left[place] > 0:
        budget = BUDGET
        for index, size in enumerate(left):
            taken = min(size, budget)
            left[index] -= taken
            budget -= taken
        now += TOKEN_S * (BUDGET - budget)
    return now


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=20), st.integers(1, 2000), st.floats(0.0, 0.49))
def test_it_is_when_shorter_prompts_and_the_step_are_computed(waiting: list[int], new: int, running_for_s: float):
    sizes = PromptSizes()
    for size in waiting:
        sizes.add(size)
    running_s = 0.5 - running_for_s
    all_s, own_s = running_s + TOKEN_S * sum(waiting), TOKEN_S * new
    exact = sum(size for size in waiting if size <= new) / sum(waiting)
    found = shortest_first_wait_s(all_s, own_s, exact, 0.5, running_for_s)
    assert found + own_s == pytest.approx(running_s + computed_at(waiting, new), abs=1e-6)
    assert sizes.shorter_share(new) >= exact, "prompts of about its size came before it"
    longer = sum(size for size in waiting if size > 1.2 * new) / sum(waiting)
    assert sizes.shorter_share(new) <= 1.0 - longer + 1e-9


@given(st.lists(st.integers(0, 100_000), max_size=30), st.integers(1, 100_000))
def test_sizes_that_have_left_count_no_more(sizes: list[int], new: int):
    found = PromptSizes()
    for size in [*sizes, new]:
        found.add(size)
    for size in sizes:
        found.remove(size)
    assert found.shorter_share(new) == 1.0 and found.shorter_share(1) == (1.0 if new == 1 else 0.0)
    found.remove(new)
    assert found.shorter_share(new) == 1.0, "nothing is known"


def test_nothing_waits_or_all_fits_into_the_step():
    assert shortest_first_wait_s(0.0, 1.0, 0.5, 0.5, 0.0) == 0.0
    assert shortest_first_wait_s(0.3, 1.0, 0.5, 0.0, 0.0) == 0.3
    assert shortest_first_wait_s(0.3, 1.0, 0.5, 0.5, 0.1) == pytest.approx(0.3), "what runs is not stopped"


def prefill_worker(*sizes: int, **load: float) -> WorkerRegistry:
    registry = WorkerRegistry([P], [], worker_timeout_s=2.0)
    hello = hello_of(P, "prefill", block_size=16, num_blocks=10_000, max_num_seqs=64, max_step_tokens=BUDGET)
    registry.on_hello(P, hello, 0.0)
    registry.on_heartbeat(P, heartbeat_of(P, step=1, serial=0, num_free_blocks=10_000, step_model=MODEL, **load), 0.0)
    for size in sizes:
        registry.book(P, 0.0, prompt=StepShape.of_prompt(0, size), num_blocks=1)
    return registry


def wait_of(registry: WorkerRegistry, num_tokens: int, now: float = 0.0, ttft_s: float = 0.0) -> float:
    shape = RequestShape(num_tokens, 100, NO_HITS, ttft_s=ttft_s)
    return forecast_prefill(registry.workers[P], shape, now).wait_s


def test_a_short_prompt_waits_for_the_step_and_not_for_long_prompts():
    registry = prefill_worker(4000, 4000)
    assert wait_of(registry, 100) == pytest.approx(0.5 + 0.4), "the step that runs, and the rest of its own"
    assert wait_of(registry, 4000) == pytest.approx(8.0), "prompts of one size come in turn"
    assert wait_of(registry, 100, now=0.3) == pytest.approx(0.2 + 0.4)


def test_a_prompt_that_is_computed_makes_the_wait_shorter_for_those_behind_it():
    registry = prefill_worker(1000)
    first = next(iter(registry.workers[P].bookings.by_serial.values()))
    for _ in range(2):
        registry.book(P, 0.0, prompt=StepShape.of_prompt(0, 1000), num_blocks=1)
    before = wait_of(registry, 1000, now=0.9)
    registry.computed(first, 1.0)
    assert before == pytest.approx(2.1) and wait_of(registry, 1000, now=1.0) == pytest.approx(2.0)


def test_with_a_goal_all_that_wait_count():
    assert wait_of(prefill_worker(4000, 4000), 100, ttft_s=60.0) == pytest.approx(8.0)


def test_what_other_routers_sent_is_waited_for_in_full():
    assert wait_of(prefill_worker(waiting_s=3.0), 100) == pytest.approx(3.0)


def test_the_pace_of_tokens_follows_answers_and_no_single_one():
    pace = TokenPace()
    assert pace.value == 1.0
    pace.observe(decode_s=9.0, num_tokens=3, predicted_s=0.01)
    pace.observe(decode_s=9.0, num_tokens=100, predicted_s=0.0)
    assert pace.value == 1.0, "few tokens, or no prediction, say nothing"
    pace.observe(decode_s=1000.0, num_tokens=100, predicted_s=0.01)
    assert 1.0 < pace.value < 1.05
    for _ in range(200):
        pace.observe(decode_s=0.5, num_tokens=100, predicted_s=0.01)
    assert pace.value == pytest.approx(0.5, rel=0.01)
    for ratio, bound in ((1e-9, LEAST), (1e9, MOST)):
        for _ in range(400):
            pace.observe(decode_s=ratio, num_tokens=100, predicted_s=0.01)
        assert pace.value == pytest.approx(bound, rel=0.01)


def test_drafts_that_were_accepted_shorten_what_is_predicted_of_every_decode_worker():
    registry = WorkerRegistry([], [D], worker_timeout_s=2.0)
    registry.on_hello(D, hello_of(D, "decode", block_size=16, num_blocks=10_000, max_num_seqs=64), 0.0)
    registry.on_heartbeat(D, heartbeat_of(D, step=1, serial=0, num_free_blocks=10_000, step_model=MODEL), 0.0)
    shape = RequestShape(100, 100, NO_HITS)
    before = forecast_decode(registry.workers[D], shape)
    assert before.token_s == before.model_token_s > 0.0
    for _ in range(200):
        registry.on_request_finished(D, 0.5 * 100 * before.model_token_s, 100, before.model_token_s)
    registry.sweep(0.1)
    after = forecast_decode(registry.workers[D], shape)
    assert after.model_token_s == before.model_token_s
    assert math.isclose(after.token_s, 0.5 * before.token_s, rel_tol=0.01)
