"""Readings of a watch, the requests that are sent, and a whole run against a server made for the purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stalls
from benchmarks.stalls import Offender, Row, Watch, chosen, offenders, prompt_of, send, text_of


@pytest.mark.parametrize(
    ("tokens", "gap_s"),
    [
        ([1.0, 9.0, 11.0, 12.0, 19.9], 7.9),
        ([1.0, 13.0, 19.9], 12.0),  # began before
        ([9.0, 10.5, 12.0], 8.0),  # has not ended
        ([2.0], 18.0),
        ([9.0, 10.0, 19.0, 20.0, 90.0], 9.0),  # what came later is no gap of this window
        ([], 10.0),
    ],
)
def test_a_gap_that_touches_the_window_counts(tokens: list[float], gap_s: float) -> None:
    assert Watch(tokens=tokens).worst_gap(10.0, 20.0) == pytest.approx(gap_s)


def test_an_answer_awaited_in_the_window_counts() -> None:
    polls = [(0.0, 8.0), (9.0, 10.5), (11.0, 11.2), (19.0, 20.0), (21.0, 29.0)]
    assert Watch(polls=polls).worst_poll(10.0, 20.0) == pytest.approx(1.5)
    assert Watch().worst_poll(10.0, 20.0) == 10.0


def test_a_goal_is_met_by_both_times_and_an_unbroken_stream() -> None:
    good: dict[str, Any] = {"name": "a", "statuses": {}, "message": "", "took_s": 1.0, "ready_s": 0.1, "gap_s": 0.9}
    assert Row(**good, broken=[]).meets_goal
    assert not Row(**good | {"ready_s": 0.3}, broken=[]).meets_goal
    assert not Row(**good | {"gap_s": 1.1}, broken=[]).meets_goal
    assert not Row(**good, broken=["status 503"]).meets_goal


def test_requests_are_of_the_size_that_their_names_say() -> None:
    sizes = {one.name: sum(len(json.dumps(body)) for _, body in one.requests()) for one in offenders()}
    assert 600_000 < sizes["/tokenize, 0.6 MB"] < 601_000
    assert 22_500_000 < sizes["3 x /tokenize, 7.5 MB"] < 22_501_000
    assert all(size < 3 * 8 * 1024 * 1024 for size in sizes.values()) and len(sizes) == len(offenders())
    ((_, schema),) = next(one for one in offenders() if "schema" in one.name).requests()
    assert len(json.dumps(schema["response_format"]["json_schema"]["schema"], separators=(",", ":"))) < 57
    ((_, many),) = next(one for one in offenders() if "n=128, 3,900" in one.name).requests()
    assert [len(prompt) for prompt in many["prompt"]] == [3900] * 8 and many["n"] == 128
    assert len(text_of(1000)) == 1000 and prompt_of(1, 9) != prompt_of(2, 9) == prompt_of(2, 9)


def test_nothing_is_measured_first_and_words_choose_the_rest() -> None:
    assert chosen([]) == ["", *(one.name for one in offenders())]
    assert chosen(["detokenize", "regex"]) == ["", "/detokenize, 1,000,000 ids", "12 short regexes"]


def test_what_requests_are_told(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "hi", "max_tokens": 2}
    requests = [("/v1/completions", body | {"model": model}) for model in ("good", "busy", "busy")]
    monkeypatch.setattr(stalls, "offenders", lambda: [Offender("some", lambda: requests)])
    statuses, message = send(server.url, "some", 20.0)
    assert statuses == {"200": 1, "503": 2} and "no worker" in message
    slow = [("/v1/completions", {"prompt": "hi", "max_tokens": 4000, "model": "slow"})]
    monkeypatch.setattr(stalls, "offenders", lambda: [Offender("some", lambda: slow)])
    assert send(server.url, "some", 0.3) == ({"none": 1}, "no answer within 0.3 s")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stalls.json"
    flags = ["--model", "tiny-random", "--quiet-s", "0.5", "--only", "0.6 MB", "--log-dir", str(tmp_path)]
    assert stalls.main([*flags, "--output", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["none", "/tokenize, 0.6 MB"]
    assert [row["statuses"] for row in rows] == [{}, {"200": 1}] and not any(row["broken"] for row in rows)
    assert all(0 < row["ready_s"] < 60 and 0 < row["gap_s"] < 60 for row in rows)
    assert "worst /ready" in capsys.readouterr().out
