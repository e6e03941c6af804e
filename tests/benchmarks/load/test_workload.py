import itertools
import statistics

import pytest

from benchmarks.load.trace import TraceRow
from benchmarks.load.workload import (
    LengthRange,
    Vocabulary,
    Workload,
    fit_rows,
    poisson_arrivals,
    trace_arrivals,
)

TOKENS = Vocabulary(tuple(range(100, 400)))


def workload(**changes: object) -> Workload:
    settings = {"vocabulary": TOKENS, "input_len": LengthRange(20, 20), "output_len": LengthRange(5, 9), "seed": 3}
    return Workload(**(settings | changes))  # type: ignore[arg-type]


def leading(left: list[int], right: list[int]) -> int:
    """How many leading tokens two prompts share."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@pytest.mark.parametrize(("text", "low", "high"), [("128", 128, 128), ("64-512", 64, 512)])
def test_lengths(text: str, low: int, high: int) -> None:
    assert LengthRange.parse(text) == LengthRange(low, high)


@pytest.mark.parametrize("text", ["", "a", "0", "9-3", "1-2-3", "-4"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ValueError, match=r"number nor|at least 1"):
        LengthRange.parse(text)


def test_prompts_have_exact_lengths_and_repeat_with_the_seed() -> None:
    plan = workload().request(4)
    assert len(plan.prompt) == plan.input_len == 20
    assert 5 <= plan.output_len <= 9
    assert plan == workload().request(4)
    assert plan.prompt != workload(seed=4).request(4).prompt


def test_lengths_cover_their_range() -> None:
    lengths = {workload(input_len=LengthRange(1, 4)).request(i).input_len for i in range(100)}
    assert lengths == {1, 2, 3, 4}


def test_only_the_shared_prefix_is_shared() -> None:
    prompts = [workload(shared_prefix_len=12).request(i).prompt for i in range(2)]
    assert len(prompts[0]) == 20
    assert 12 <= leading(*prompts) < 20  # type: ignore[arg-type]
    assert leading(*(workload().request(i).prompt for i in range(2))) < 3  # type: ignore[arg-type]


def test_text_prompts_have_so_many_words() -> None:
    prompt = workload(vocabulary=Vocabulary()).request(0).prompt
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 20


def test_trace_blocks_are_really_shared() -> None:
    rows = [TraceRow(0, 1000, 5, (0, 1)), TraceRow(0, 1100, 6, (0, 1, 2)), TraceRow(0, 600, 0, (0, 7))]
    plans = [workload(rows=rows).request(i) for i in range(3)]
    assert [len(plan.prompt) for plan in plans] == [1000, 1100, 600]
    assert leading(plans[0].prompt, plans[1].prompt) == 1000  # type: ignore[arg-type]
    assert 512 <= leading(plans[0].prompt, plans[2].prompt) < 520  # type: ignore[arg-type]
    assert [plan.output_len for plan in plans] == [5, 6, 1]


def test_a_trace_starts_over_with_other_tokens() -> None:
    again = workload(rows=[TraceRow(0, 600, 5, (0, 1))])
    assert leading(again.request(0).prompt, again.request(1).prompt) < 5  # type: ignore[arg-type]


def test_scaled_rows_still_share() -> None:
    rows = fit_rows([TraceRow(0, 1024, 50, (0, 1)), TraceRow(0, 1024, 500, (0, 2))], scale=0.25, max_output_len=100)
    assert [(row.input_len, row.output_len) for row in rows] == [(256, 12), (256, 100)]
    plans = [workload(rows=rows, block_tokens=128).request(i).prompt for i in range(2)]
    assert 128 <= leading(*plans) < 135  # type: ignore[arg-type]


def test_poisson_arrivals_have_the_rate() -> None:
    times = list(itertools.islice(poisson_arrivals(50.0, seed=1), 20_001))
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)


def test_infinite_rate_is_all_at_once() -> None:
    assert list(itertools.islice(poisson_arrivals(float("inf"), seed=1), 3)) == [0.0, 0.0, 0.0]


def test_trace_arrivals_are_sped_up_and_jittered_in_order() -> None:
    rows = [TraceRow(at, 1, 1) for at in (0.0, 3.0, 3.0, 9.0)]
    assert trace_arrivals(rows, speedup=3.0, seed=0) == [0.0, 1.0, 1.0, 3.0]
    moved = trace_arrivals(rows, speedup=3.0, jitter_s=0.5, seed=0)
    assert moved == sorted(moved)
    assert all(0 <= after - before <= 1.5 for before, after in zip([0.0, 1.0, 1.0, 3.0], moved, strict=True))
