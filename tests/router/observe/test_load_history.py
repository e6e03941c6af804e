"""The load of the last hour: one point per step, bounded, with processes merged."""

from __future__ import annotations

from router.observe.load_history import HISTORY_S, LEAST, MAX_MODELS, NAMES, STEP_S, SUMMED, LoadHistory, merged_history


def point(value: float | None) -> dict[str, float | None]:
    return dict.fromkeys(NAMES, value)


def test_an_hour_is_kept_with_one_point_per_step() -> None:
    history = LoadHistory(0.0)
    for number in range(HISTORY_S // STEP_S + 30):
        history.add("", point(float(number)), number * STEP_S + 0.5)
        history.add("", point(-1.0), number * STEP_S + 0.9)
    last = number * STEP_S
    body = history.body("", last)
    assert len(body["points"]) == HISTORY_S // STEP_S
    assert body["points"][-1] == {"at": last + STEP_S, **point(float(number))}
    assert not history.body("", last + HISTORY_S + STEP_S)["points"]


def test_missing_numbers_and_too_many_models() -> None:
    history = LoadHistory(0.0)
    for number in range(2 * MAX_MODELS):
        history.add(str(number), point(None), 1.0)
    assert history.body("0", 1.0)["points"] == [{"at": STEP_S, **point(None)}]
    assert not history.body(str(2 * MAX_MODELS - 1), 1.0)["points"]


def test_processes_are_merged_by_time() -> None:
    first, second = LoadHistory(50.0), LoadHistory(40.0)
    first.add("", point(1.0), 95.0)
    first.add("", point(None), 105.0)
    second.add("", point(3.0), 96.0)
    merged = merged_history([first.body("", 110.0), second.body("", 110.0)])
    both = {name: 4.0 if name in SUMMED else 1.0 if name in LEAST else 3.0 for name in NAMES}
    assert merged["points"] == [{"at": 100, **both}, {"at": 110, **point(None)}]
    assert merged["started_at"] == 40.0
