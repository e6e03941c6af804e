"""A fit finds the coefficients of a machine from its noisy steps, follows it, and keeps what it saw long ago."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from common.latency.step_fit import MAX_KINDS, StepFit
from common.latency.step_model import StepModel, StepShape

CPU = StepModel(fixed_s=4e-3, token_s=4e-4, pair_s=2e-8, row_s=5e-4, context_s=2e-7, num_steps=1)
GPU = StepModel(fixed_s=3e-3, floor_s=6e-3, token_s=3e-5, pair_s=1e-9, row_s=2e-5, context_s=5e-8, num_steps=1)


class Machine:
    """Steps of random shapes, with 5 % of noise, and now and then one that something else held up."""

    def __init__(self, model: StepModel, seed: int = 1) -> None:
        self.model, self._random = model, random.Random(seed)

    def prompt(self) -> StepShape:
        start = self._random.choice((0, 0, 0, 512, 1024, 2048))
        return StepShape.of_prompt(start, start + self._random.randint(1, 512))

    def rows(self) -> StepShape:
        count = self._random.randint(1, 64)
        return StepShape.of_rows(count, sum(self._random.randint(50, 2000) for _ in range(count)))

    def both(self) -> StepShape:
        return self.rows() + (self.prompt() if self._random.random() < 0.3 else StepShape())

    def run(self, fit: StepFit, shape: Callable[[], StepShape], count: int) -> None:
        for _ in range(count):
            step = shape()
            noise = max(0.3, self._random.gauss(1.0, 0.05)) * (4.0 if self._random.random() < 0.02 else 1.0)
            fit.observe(step, self.model.seconds(step) * noise)

    def errors(self, fit: StepFit, shape: Callable[[], StepShape]) -> list[float]:
        """Of 200 new steps, sorted."""
        steps = [shape() for _ in range(200)]
        return sorted(abs(fit.model.seconds(step) / self.model.seconds(step) - 1.0) for step in steps)


@pytest.mark.slow_cases("both-gpu")
@pytest.mark.parametrize("model", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["prompt", "rows", "both"])
def test_steps_it_has_not_seen_are_predicted(model: StepModel, kind: str) -> None:
    machine, fit = Machine(model), StepFit()
    machine.run(fit, getattr(machine, kind), 400)
    errors = machine.errors(fit, getattr(machine, kind))
    assert errors[100] < 0.06 and errors[180] < 0.12
    assert 0.0 < fit.model.error < 0.2
    assert fit.model.num_steps > 200


def test_a_few_steps_of_one_shape_say_more_than_nothing() -> None:
    fit = StepFit()
    for _ in range(3):
        fit.observe(StepShape.of_prompt(0, 512), 0.2)
    assert not fit.model.is_known
    fit.observe(StepShape.of_prompt(0, 512), 0.2)
    assert fit.model.seconds(StepShape.of_prompt(0, 512)) == pytest.approx(0.2, rel=0.05)
    assert fit.model.seconds(StepShape.of_prompt(0, 256)) < 0.15  # tokens explain it rather than a fixed part


def test_a_lone_sequence_does_not_make_a_second_one_look_twice_as_slow() -> None:
    """Most of a step reads the weights, however many sequences share it: what one costs shows when there are two."""
    machine, fit = Machine(CPU), StepFit()
    machine.run(fit, lambda: StepShape.of_rows(1, 540), 100)
    one_s, four_s = (fit.model.seconds(StepShape.of_rows(num, num * 540)) for num in (1, 4))
    assert one_s == pytest.approx(CPU.seconds(StepShape.of_rows(1, 540)), rel=0.2)
    assert four_s < 1.5 * one_s, "four would take 3.4 times as long, and miss a goal that they meet"
    machine.run(fit, lambda: StepShape.of_rows(2, 1080), 8)
    four_rows = StepShape.of_rows(4, 2160)
    assert fit.model.seconds(four_rows) == pytest.approx(CPU.seconds(four_rows), rel=0.5)


def test_a_long_stall_in_the_first_step_is_soon_outvoted() -> None:
    fit = StepFit()
    fit.observe(StepShape.of_prompt(0, 3), 0.5)
    for _ in range(7):
        fit.observe(StepShape.of_prompt(0, 3), 0.001)
    assert fit.model.seconds(StepShape.of_prompt(0, 3)) < 0.005


@pytest.mark.parametrize("seed", range(8))
def test_short_prompts_do_not_make_long_ones_look_endless(seed: int) -> None:
    machine, fit = Machine(CPU, seed), StepFit()
    rng = random.Random(seed)
    machine.run(fit, lambda: StepShape.of_prompt(0, rng.randint(1, 20)), 40)
    long = StepShape.of_prompt(0, 4000)
    assert fit.model.seconds(long) < 3 * machine.model.seconds(long)


@pytest.mark.parametrize("num_steps", [4, 40])
def test_a_few_tiny_prompts_do_not_make_long_ones_look_endless(num_steps: int) -> None:
    fit = StepFit()
    for _ in range(num_steps):
        fit.observe(StepShape.of_prompt(0, 1), 0.0019)
    assert fit.model.seconds(StepShape.of_prompt(0, 1)) == pytest.approx(0.0019, rel=0.05)
    assert fit.model.seconds(StepShape.of_prompt(0, 512)) < 0.02
    for _ in range(4):
        fit.observe(StepShape.of_prompt(0, 512), 0.5)
    assert fit.model.seconds(StepShape.of_prompt(0, 512)) == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("seed", range(6))
def test_the_ends_of_cached_prompts_do_not_make_long_ones_look_endless(seed: int) -> None:
    machine, fit = Machine(CPU, seed), StepFit()
    rng = random.Random(seed)
    machine.run(fit, lambda: StepShape.of_prompt(0, rng.randint(1, 3)), 8)
    machine.run(fit, lambda: StepShape.of_prompt(176, 180), 8)
    machine.run(fit, lambda: StepShape.of_prompt(400, 404), 8)
    long = StepShape.of_prompt(0, 4000)
    assert fit.model.seconds(long) < 3 * machine.model.seconds(long)


def test_few_decoded_tokens_do_not_make_long_contexts_look_slow() -> None:
    machine, fit = Machine(CPU), StepFit()
    rng = random.Random(5)
    machine.run(fit, lambda: StepShape.of_rows(rows := rng.randint(1, 4), rows * rng.randint(1, 40)), 60)
    long = StepShape.of_rows(32, 32 * 4000)
    assert fit.model.seconds(long) < 4 * machine.model.seconds(long)


def test_what_only_short_prompts_come_after_is_not_forgotten() -> None:
    machine, fit = Machine(CPU), StepFit()
    machine.run(fit, machine.both, 300)
    machine.run(fit, lambda: StepShape.of_rows(4, 2000), 3000)
    assert machine.errors(fit, machine.prompt)[180] < 0.2


def test_a_machine_that_becomes_slow_is_followed() -> None:
    machine, fit = Machine(CPU), StepFit()
    machine.run(fit, machine.prompt, 300)
    slow = Machine(StepModel(fixed_s=8e-3, token_s=8e-4, pair_s=4e-8, num_steps=1), seed=2)
    slow.run(fit, slow.prompt, 300)
    assert slow.errors(fit, slow.prompt)[180] < 0.15


@pytest.mark.slow
def test_no_coefficient_is_negative_and_memory_is_bounded() -> None:
    fit, rng = StepFit(), random.Random(3)
    for _ in range(2000):
        shape = StepShape(rng.randint(0, 5000), rng.randint(0, 10**8), rng.randint(0, 300), rng.randint(0, 10**6))
        fit.observe(shape, rng.uniform(1e-4, 1.0))
    assert len(fit._kinds) <= MAX_KINDS
    model = fit.model
    assert min(model.fixed_s, model.floor_s, model.token_s, model.pair_s, model.row_s, model.context_s) >= 0.0


def test_a_step_that_computed_nothing_teaches_nothing() -> None:
    fit = StepFit()
    fit.observe(StepShape(), 0.1)
    fit.observe(StepShape.of_rows(1, 1), 0.0)
    assert not fit.model.is_known


def test_what_is_new_is_learnt_within_a_few_steps() -> None:
    machine, fit = Machine(CPU), StepFit()
    machine.run(fit, lambda: StepShape.of_rows(1, 300), 3000)
    assert not fit.model.knows_prompts
    machine.run(fit, lambda: StepShape.of_prompt(0, 400), 4)
    assert fit.model.knows_prompts
    machine.run(fit, lambda: StepShape.of_rows(16, 4800), 4)
    assert fit.model.seconds(StepShape.of_rows(16, 4800)) == pytest.approx(
        CPU.seconds(StepShape.of_rows(16, 4800)), rel=0.2
    )


@pytest.mark.parametrize("num_before", [2600, 2750, 2900, 3050])
def test_a_worker_that_slows_down_is_judged_anew_long_before_the_next_fit_is_due(num_before: int) -> None:
    fit, shape = StepFit(), StepShape.of_rows(40, 40 * 1200)
    for _ in range(num_before):
        fit.observe(shape, 0.03)
    for _ in range(60):
        fit.observe(shape, 0.06)
    assert fit.model.seconds(shape) == pytest.approx(0.06, rel=0.1)


@pytest.mark.slow
def test_times_that_only_vary_do_not_move_kinds_that_do_not_come() -> None:
    """On a busy machine steps of one kind differ by factors for hours; prompts did not become slower."""
    found, source = StepFit(), random.Random(1)
    for num_tokens in (16, 100, 500):
        for _ in range(8):
            found.observe(StepShape.of_prompt(0, num_tokens), 0.002 + num_tokens * 1e-5)
    before_s = found.model.seconds(StepShape.of_prompt(0, 500))
    for _ in range(10_000):
        num_rows = source.choice((1, 2, 4, 8))
        found.observe(StepShape.of_rows(num_rows, 50 * num_rows), 1e-3 * source.lognormvariate(0.0, 1.0))
    assert before_s / 8 < found.model.seconds(StepShape.of_prompt(0, 500)) < 8 * before_s


@pytest.mark.parametrize("factor", [1e9, 1e-9])
def test_a_model_can_be_sent_whatever_steps_take(factor: float) -> None:
    """Routers drop a heartbeat with a coefficient out of bounds, so the worker would count as dead."""
    found, source = StepFit(), random.Random(2)
    for number in range(500):
        shape = StepShape.of_prompt(0, source.randint(1, 900)) if number % 3 else StepShape.of_rows(2, 200)
        found.observe(shape, factor * source.lognormvariate(0.0, 3.0))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found.model), type=StepModel) == found.model
