"""A plan's pick beside the best of a sweep of real clusters."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.load.summary import Distribution
from benchmarks.plan.candidate import Candidate, Flags
from benchmarks.sweep import __main__ as sweep
from benchmarks.sweep.__main__ import Swept, judge
from common.errors import ConfigError

FLAGS = Flags(64, 512, 64, 128)
DATA = Path(sweep.__file__).parent.parent / "data"


def swept(num_prefill: int, num_decode: int, attainment: float, goodput: float) -> Swept:
    none = Distribution()
    cost = float(num_prefill + num_decode)
    return Swept(Candidate(num_prefill, num_decode, FLAGS), cost, attainment, goodput, 0.0, 0.0, none, none, 0.0)


def test_the_best_is_the_cheapest_that_met_the_goals_and_of_equals_the_one_with_most_goodput() -> None:
    found = [swept(0, 1, 0.5, 1.0), swept(1, 1, 0.94, 3.0), swept(1, 2, 0.96, 3.0), swept(2, 1, 0.99, 3.2)]
    verdict = judge([*found, swept(2, 2, 1.0, 3.3)], Candidate(1, 2, FLAGS), 0.95)
    assert verdict.best is found[3] and verdict.pick is found[2]
    assert verdict.cost_ratio == 1.0 and verdict.goodput_ratio == pytest.approx(3.0 / 3.2)
    assert not verdict.is_within_mark


@pytest.mark.parametrize(
    ("pick", "cost_ratio", "within"),
    [((1, 1), 1.0, True), ((1, 2), 1.5, False), (None, math.inf, False)],
    ids=["the best", "a dearer one", "none"],
)
def test_a_pick_that_costs_more_is_beyond_the_mark(
    pick: tuple[int, int] | None, cost_ratio: float, within: bool
) -> None:
    found = [swept(1, 1, 1.0, 3.0), swept(1, 2, 1.0, 3.0)]
    verdict = judge(found, Candidate(*pick, FLAGS) if pick else None, 0.95)
    assert (verdict.cost_ratio, verdict.is_within_mark) == (cost_ratio, within)


def test_a_plan_that_finds_nothing_is_right_where_nothing_meets_the_goals() -> None:
    assert judge([swept(1, 1, 0.9, 3.0)], None, 0.95).is_within_mark
    assert not judge([swept(1, 1, 0.9, 3.0)], Candidate(1, 1, FLAGS), 0.95).is_within_mark


def test_a_pick_that_misses_the_goals_is_wrong_however_little_it_costs() -> None:
    found = [swept(1, 1, 0.94, 3.0), swept(1, 2, 0.96, 3.1)]
    verdict = judge(found, Candidate(1, 1, FLAGS), 0.95)
    assert verdict.cost_ratio < 1.0 and not verdict.is_within_mark


@pytest.mark.parametrize(
    ("line", "field"),
    [("routers = 2", "routers"), ("settings = { max_wait_s = 5.0 }", "settings"), ("", "")],
    ids=["routers", "settings", "none"],
)
def test_what_a_sweep_does_not_have_is_refused(tmp_path: Path, line: str, field: str) -> None:
    (tmp_path / "plan.toml").write_text(f"{line}\n{(DATA / 'sweep-answers.toml').read_text()}")
    if not field:
        assert sweep.spec_at(tmp_path / "plan.toml").bounds.max_workers == 4
        return
    with pytest.raises(ConfigError, match=field):
        sweep.spec_at(tmp_path / "plan.toml")


def test_requests_of_a_sweep_share_the_prefixes_of_the_plan(tmp_path: Path) -> None:
    text = (DATA / "sweep-answers.toml").read_text().replace("[load]", "[load]\nshared_prefix_len = 48")
    (tmp_path / "plan.toml").write_text(text)
    rows, id_tokens = sweep.rows_of(sweep.spec_at(tmp_path / "plan.toml"), Candidate(1, 1, FLAGS))
    assert id_tokens == 48 and len({row.block_ids for row in rows}) == 1 and rows[0].block_ids


@pytest.mark.slow
def test_a_sweep_starts_each_candidate_and_sends_it_the_plan_s_requests(tmp_path: Path) -> None:
    plan = (DATA / "sweep-answers.toml").read_text()
    for long, short in (("max_workers = 4", "max_workers = 2"), ("duration_s = 40", "duration_s = 2")):
        assert long in plan
        plan = plan.replace(long, short)
    (tmp_path / "short.toml").write_text(plan)
    output = tmp_path / "sweep.json"
    assert sweep.main([str(tmp_path / "short.toml"), "--output", str(output)]) == 0
    (found,) = json.loads(output.read_text())["plans"]
    assert {one["pools"] for one in found["candidates"]} == {"one pool of 1", "one pool of 2", "1P + 1D"}
    for one in found["candidates"]:
        assert one["real"]["failed"] == 0.0 and one["real"]["ttft_ms"]["count"] > 0
    assert found["pick"] in {one["pools"] for one in found["candidates"]}
