"""The time of a step, of a prompt in chunks, and how many tokens fit into a limit."""

from __future__ import annotations

import pytest

from common.latency.step_model import StepModel, StepShape

MODEL = StepModel(fixed_s=1e-3, floor_s=5e-3, token_s=1e-4, pair_s=1e-8, row_s=2e-4, context_s=1e-7, num_steps=1)


def test_the_shape_of_a_prompt_is_that_of_its_chunks() -> None:
    whole = StepShape.of_prompt(16, 512)
    assert StepShape.sum([StepShape.of_prompt(16, 100), StepShape.of_prompt(100, 512)]) == whole
    assert whole == StepShape(num_tokens=496, num_pairs=512 * 512 - 16 * 16)


def test_a_step_of_few_tokens_takes_as_long_as_the_floor() -> None:
    assert MODEL.seconds(StepShape.of_prompt(0, 10)) == pytest.approx(6e-3)
    assert MODEL.seconds(StepShape.of_prompt(0, 100)) == pytest.approx(1e-3 + 1e-2 + 1e-4)


def test_rows_come_on_top() -> None:
    rows = StepShape.of_rows(8, 4000)
    assert MODEL.seconds(rows) == pytest.approx(6e-3 + 8 * 2e-4 + 4000e-7)
    both = MODEL.seconds(rows + StepShape.of_prompt(0, 200))
    assert both == pytest.approx(MODEL.seconds(StepShape.of_prompt(0, 200)) + 8 * 2e-4 + 4000e-7)


@pytest.mark.parametrize(("start", "end", "chunk"), [(0, 1000, 256), (512, 600, 64), (0, 1, 512), (100, 100, 8)])
def test_a_prompt_takes_the_time_of_its_steps(start: int, end: int, chunk: int) -> None:
    beside = StepShape.of_rows(4, 900)
    borders = [*range(start, end, chunk), end]
    steps = [
        MODEL.seconds(StepShape.of_prompt(low, high) + beside) for low, high in zip(borders, borders[1:], strict=False)
    ]
    found = MODEL.steps_s(StepShape.of_prompt(start, end), chunk, beside)
    assert found == pytest.approx(sum(steps), rel=0.02)


@pytest.mark.parametrize("pair_s", [0.0, 1e-8, 1e-6])
@pytest.mark.parametrize("start", [0, 4000])
@pytest.mark.parametrize("limit_s", [0.02, 0.1, 2.0])
def test_the_most_tokens_that_fit_a_limit_fit_it(pair_s: float, start: int, limit_s: float) -> None:
    model = StepModel(fixed_s=1e-3, floor_s=5e-3, token_s=1e-4, pair_s=pair_s, row_s=2e-4, num_steps=1)
    beside = StepShape.of_rows(16, 0)
    count = model.most_tokens(start, beside, limit_s)
    assert model.seconds(beside + StepShape.of_prompt(start, start + count)) <= limit_s + 1e-9
    assert model.seconds(beside + StepShape.of_prompt(start, start + count + 2)) > limit_s


def test_nothing_fits_where_the_rows_alone_take_longer() -> None:
    assert MODEL.most_tokens(0, StepShape.of_rows(100, 10_000), 0.02) == 0


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 64), (500, 2548), (4096, 4097)])
def test_a_step_of_one_prompt_takes_what_its_shape_does(start: int, end: int) -> None:
    model = StepModel(fixed_s=0.003, floor_s=0.01, token_s=4e-5, pair_s=3e-10, row_s=1e-4, num_steps=9)
    assert model.prompt_s(start, end) == model.seconds(StepShape.of_prompt(start, end))
