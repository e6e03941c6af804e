"""Simulations of a real run's requests, drawn several times."""

from __future__ import annotations

from benchmarks.load.trace import TraceRow
from benchmarks.reality.chance import Chance, moved


def test_requests_come_later_by_chance_and_stay_in_order() -> None:
    rows = [TraceRow(number / 1000, 10 + number, 5) for number in range(50)]
    first, again, other = moved(rows, 0.01, 1), moved(rows, 0.01, 1), moved(rows, 0.01, 2)
    assert first == again != other
    assert [row.arrival_s for row in first] == sorted(row.arrival_s for row in first)
    late_s = {row.input_len: row.arrival_s - (row.input_len - 10) / 1000 for row in first}
    assert len(late_s) == 50 and all(0.0 <= seconds <= 0.01 for seconds in late_s.values())


def test_a_real_value_is_compared_with_the_range_and_the_median_of_draws() -> None:
    draws = [{"TTFT p99": value, "TTFT p50": 100.0} for value in (90.0, 130.0, 100.0)]
    one = Chance("a run", "file", {"TTFT p99": 115.0, "TTFT p50": 101.0}, draws)
    assert one.range_of("TTFT p99") == (90.0, 100.0, 130.0)
    assert one.is_within("TTFT p99") and one.deviates("TTFT p99")
    assert not one.is_within("TTFT p50") and not one.deviates("TTFT p50")
