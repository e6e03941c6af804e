"""The steps of `make sla`: what they compute from runs, and that their numbers can be shown and drawn."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.alternating import first_work
from benchmarks.alternating.first_work import RoleChange
from benchmarks.load.arrivals import RateProfile
from benchmarks.load.summary import OK, RequestRecord
from benchmarks.load.workload import LengthRange
from benchmarks.prompt_order import VirtualPrompt
from benchmarks.sla import __main__ as sla
from benchmarks.sla import knobs, prediction, reality, roles
from benchmarks.sla.batches import Decoded, come_before, token_seconds
from benchmarks.sla.foresight import foreseen
from benchmarks.sla.real import requests_logged, served
from benchmarks.sla.step import Settings, Skipped
from common.latency.step_model import StepModel

from .conftest import ScriptedServer


def drawn_and_shown(step: Any, numbers: Any, folder: Path) -> str:
    """What a step prints of numbers that went through JSON."""
    numbers = json.loads(json.dumps(numbers))
    console = Console(width=200, record=True, quiet=False, file=(folder / "out").open("w"))
    step.show(console, numbers)
    step.draw(numbers, folder / "p.png", "title")
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    console.file.close()
    return console.export_text()


def line(predicted: tuple[float, float], measured: tuple[float, float], **more: Any) -> dict[str, Any]:
    """A router's log line of a request with an answer of 11 tokens."""
    fields = {"predicted_ttft_ms": predicted[0], "predicted_token_ms": predicted[1], "attempts": 1, "output": 11}
    return fields | {"queue_ms": 10.0, "prefill_ms": measured[0] - 10.0, "decode_ms": 10 * measured[1]} | more


def test_predictions_are_compared_with_what_happened(tmp_path: Path) -> None:
    lines = [line((90.0, 9.0), (100.0, 10.0)), line((50.0, 5.0), (100.0, 5.0)), line((100.0, 8.0), (80.0, 10.0))]
    others = [line((1.0, 1.0), (100.0, 10.0), attempts=2), line((100.0, 1.0), (100.0, 9.0), output=1)]
    pairs = prediction.pairs_of([*lines, *others])
    assert pairs["TTFT"] == [(90.0, 100.0), (50.0, 100.0), (100.0, 80.0), (100.0, 100.0)]
    assert pairs["TPOT"] == [(9.0, 10.0), (5.0, 5.0), (8.0, 10.0)]
    ttft, tpot = prediction.summarised("here", pairs)
    assert (ttft["num"], ttft["p50"]) == (4, pytest.approx(0.175))
    assert tpot["p50"] == pytest.approx(0.1)
    said = drawn_and_shown(prediction.STEP, {"pairs": {"here": pairs}, "summary": [ttft, tpot]}, tmp_path)
    assert "17.5%" in said


def test_a_load_served_twice_is_compared_request_by_request() -> None:
    def record(index: int, start: float, ttft_s: float, num_tokens: int = 3, outcome: str = OK) -> RequestRecord:
        times = [start + ttft_s + 0.01 * number for number in range(num_tokens)]
        return RequestRecord(index, start, token_times=times, output_tokens=num_tokens, outcome=outcome)

    first = [record(number, float(number), 0.1) for number in range(10)]
    second = [record(number, 100.0 + number, 0.2) for number in reversed(range(10))]
    second[0].outcome = "timeout"  # of number 9
    second[1] = record(8, 108.0, 0.2, num_tokens=1)
    twice = prediction.twice_ms(first, second)
    assert twice["TTFT"] == [pytest.approx((100.0, 200.0))] * 7, "9 in both, 2 of them while workers learned"
    assert len(twice["TPOT"]) == 6, "one answer had a single token"
    (ttft, _) = prediction.summarised("here", twice)
    assert ttft["p50"] == pytest.approx(0.5)


def test_accepted_draft_tokens_that_were_known_save_their_steps() -> None:
    fields = {"attempts": 1, "output": 11, "decode_ms": 60.0, "predicted_step_ms": 10.0}
    others = [fields | {"attempts": 2}, fields | {"output": 1}, fields | {"predicted_step_ms": 0.0}]
    found = prediction.accepted_ms([fields, fields | {"drafted": 9, "accepted": 4}, *others])
    assert found == [(10.0, 6.0), (6.0, 6.0)]


def test_a_token_takes_the_steps_that_its_answer_shares() -> None:
    model = StepModel(row_s=0.01, context_s=1e-4, num_steps=1)
    alone, other = Decoded(0.0, 0.0, 10.0, 100, 500), Decoded(4.0, 5.0, 15.0, 100, 1000)
    assert token_seconds(alone, [alone], model) == pytest.approx(0.01 + 1e-4 * 550, rel=0.01)
    half_s = (0.01 + 1e-4 * 525, 0.02 + 1e-4 * (575 + 1025))  # of the answer, without and beside the other
    beside_s = 2 / (1 / half_s[0] + 1 / half_s[1])
    assert token_seconds(alone, [alone, other], model) == pytest.approx(beside_s, rel=0.01)
    assert come_before(alone, [alone, other]) == [alone] and come_before(other, [alone, other]) == [alone, other]
    assert token_seconds(alone, [other, Decoded(19.0, 20.0, 30.0, 9, 9)], model) == pytest.approx(beside_s, rel=0.01)


def test_answers_beside_each_other_are_read_from_the_routers_log() -> None:
    line: dict[str, Any] = {"attempts": 1, "output": 11, "prompt": 100, "decode_ms": 10_000.0, "total_ms": 10_000.0}
    lines = [line | {"time": f"2026-11-27T10:00:{second:02}+00:00"} for second in range(10, 20)]
    model = StepModel(row_s=0.1, num_steps=1)
    found = prediction.beside_ms([*lines, lines[0] | {"attempts": 2}, lines[0] | {"output": 1}], model)
    assert len(found) == 7, "of ten that count, three were answered while workers learned"
    assert [measured for _, measured in found] == pytest.approx([1000.0] * 7)
    assert found[-1][0] == pytest.approx(100.0 / np.mean([1 / rows for rows in range(10, 0, -1)]), rel=0.02)
    first = prediction.beside_ms(lines[:1] * 3 + lines, model, come_before)[0]
    assert first == pytest.approx((400.0, 1000.0), rel=0.02), "three others were there, nine came later"


def test_a_worker_whose_state_is_known_is_surprised_by_later_prompts_alone() -> None:
    def line(came_s: float, ttft_ms: float, prompt: int) -> dict[str, Any]:
        time_of = f"2026-11-27T10:00:{came_s + 1:09.6f}+00:00"
        asked = {"attempts": 1, "prefill_worker": "prefill-0", "prompt": prompt + 10, "cached": 10}
        return asked | {"time": time_of, "total_ms": 1000.0, "ttft_ms": ttft_ms}

    model = StepModel(token_s=1e-3, num_steps=1)
    learning = [line(float(second), 100.0, 100) for second in (1, 2)]
    passed = [line(10.0, 101.0, 100), line(10.01, 430.0, 300), line(10.15, 150.0, 50)]
    elsewhere = [line(10.0, 5.0, 100) | {"prefill_worker": "none"}, line(10.0, 5.0, 100) | {"attempts": 2}]
    hindsight, foresight = prediction.known_ms([*passed[::-1], *learning, *elsewhere], model, 100)
    assert [measured for _, measured in hindsight] == [measured for _, measured in foresight]
    assert hindsight[-2:] == [pytest.approx((440.0, 430.0), abs=0.01), pytest.approx((150.0, 150.0), abs=0.01)]
    assert foresight[-2:] == [pytest.approx((390.0, 430.0), abs=0.01), pytest.approx((150.0, 150.0), abs=0.01)]


def test_a_real_workers_load_is_in_proportion_to_its_rate() -> None:
    slow, fast = (StepModel(token_s=each, num_steps=1) for each in (4e-3, 1e-3))
    lengths = LengthRange(100, 300)
    assert prediction.prompts_per_s(slow, 512, lengths) == pytest.approx(1.25)
    assert prediction.prompts_per_s(fast, 512, lengths) == pytest.approx(5.0)


def test_a_known_worker_is_foreseen_but_for_shorter_prompts_that_pass() -> None:
    model = StepModel(token_s=1e-3, num_steps=1)
    lonely = [VirtualPrompt(0.0, 100, math.inf), VirtualPrompt(5.0, 200, math.inf)]
    assert foreseen(lonely, model, 100) == [pytest.approx((0.1, 0.1)), pytest.approx((0.2, 0.2))]
    passed = [VirtualPrompt(0.0, 100, math.inf), VirtualPrompt(0.01, 300, math.inf), VirtualPrompt(0.15, 50, math.inf)]
    # The long one waits 0.09 s for the first; while its own steps of 0.1 s run, a short one comes and passes.
    assert foreseen(passed, model, 100) == [
        pytest.approx((0.1, 0.1)),
        pytest.approx((0.39, 0.44)),
        pytest.approx((0.15, 0.15)),
    ]


def test_a_load_is_sent_to_a_stack_while_something_looks_on(server: ScriptedServer) -> None:
    looks: list[float] = []

    async def look() -> None:
        while True:
            looks.append(time.perf_counter())
            await asyncio.sleep(0.01)

    stack: Any = SimpleNamespace(url=server.url)
    profile = RateProfile.steps("40x0.5")
    records = served(stack, lambda: profile, ("5-9", "2"), seed=4, beside=look)
    assert len(records) == len(list(profile.arrivals(4))) and all(record.ok for record in records)
    assert looks and looks[0] <= records[0].token_times[-1]


def test_lines_of_a_log_that_say_what_was_predicted(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        '{"predicted_ttft_ms": 3}\nplain words\n{"message": "ready"}\n{"predicted_ttft_ms": 4'
    )
    assert requests_logged(tmp_path / "log", 1) == [{"predicted_ttft_ms": 3}]


def test_knobs_are_read_from_metrics() -> None:
    text = (
        "# TYPE diptych_knob gauge\n"
        'diptych_knob{engine="decode-0",knob="batch_cap",model_name="m"} 23.0\n'
        'diptych_knob{engine="decode-0",knob="step_tokens",model_name="m"} 1.28e+02\n'
        'diptych_knob_changes_total{engine="decode-0",knob="batch_cap",reason="goal"} 4.0\n'
    )
    assert knobs.knobs_in(text) == {"batch_cap": 23.0, "step_tokens": 128.0}


def test_tails_are_those_of_their_window(tmp_path: Path) -> None:
    def record(start: float, ttft_s: float, outcome: str = OK) -> RequestRecord:
        times = [start + ttft_s, start + ttft_s + 1.0] if outcome == OK else []
        return RequestRecord(0, start=start, token_times=times, output_tokens=2, outcome=outcome)

    records = [record(100.0, 0.1), record(102.0, 0.3), record(103.5, 0.0, "http 429"), record(109.5, 0.2)]
    tails = knobs.tails_of(records)
    assert [window["at_s"] for window in tails] == [1.5, 4.5, 10.5]
    assert tails[0]["ttft_p95_ms"] == pytest.approx(290.0) and tails[0]["rate"] == pytest.approx(0.67)
    assert tails[1]["ttft_p95_ms"] is None and tails[1]["tpot_p95_ms"] is None
    numbers = {"knobs": {"decode-0 batch_cap": [(0.0, 8.0), (1.0, 4.0)]}, "tails": tails, "num_good": 3}
    numbers |= {"goals": {"ttft_ms": 500.0, "tpot_ms": 20.0}, "num_requests": 4, "num_refused": 1}
    assert "75.0% of 4 requests met both goals" in drawn_and_shown(knobs.STEP, numbers, tmp_path)


def test_changes_of_roles_are_shown_with_their_parts(tmp_path: Path) -> None:
    quick = RoleChange(3.0, "decode-0", "prefill", drain_s=0.2, change_s=0.1, wait_s=0.05, step_s=0.05)
    slow = RoleChange(21.0, "decode-0", "decode", drain_s=0.9, change_s=0.1, idle_s=0.5, wait_s=0.15, step_s=0.05)
    changes = [quick, slow, RoleChange(39.0, "prefill-0", "decode")]
    numbers: dict[str, Any] = {"changes": first_work.as_json(changes), "failed": 0, "met": 0.9}
    numbers |= {"first_work": first_work.summarised(changes)}
    said = drawn_and_shown(roles.STEP, numbers, tmp_path)
    assert "first work: 0.80 s at the median, 1.20 at worst" in said
    assert "1.05 and 1.70" in said and "none" in said
    assert "1 of 2 changes brought work within 1 s; 3 were ordered, 0 requests failed, 90.0% met both goals" in said


def test_a_result_of_reality_is_drawn(tmp_path: Path) -> None:
    rows = [[0, 0.0, 0.1, 0.01, 5, 0, "ok"], [1, 0.5, 0.3, None, 1, 0, "ok"], [2, 0.7, None, None, 0, 0, "refused"]]
    run = {"case": "1P1D", "load": "conv", "policy": "diptych", "fitted_on": False, "load_average": [1.0, 2.0]}
    content = {"fields": ["index", "at_s", "ttft_s", "tpot_s", "num_tokens", "num_cached", "outcome"]}
    real = {"requests": rows, "numbers": {"goodput": 2.0}}
    fit = {"requests": rows[:1], "numbers": {"goodput": 1.95}}
    content |= {"runs": [run | {"real": real, "simulated": {"fit": fit}}]}
    file = tmp_path / "reality.json"
    file.write_text(json.dumps(content))
    numbers = reality.measure(Settings(reality=file), lambda words: None)
    assert numbers["runs"][0]["ms"]["real"] == {"TTFT": [100.0, 300.0], "TPOT": [10.0]}
    said = drawn_and_shown(reality.STEP, numbers, tmp_path)
    assert "1P1D conv diptych" in said
    assert "fit: 2 of 4 p50 and p99 within 10%, 1 of 1 goodputs within 5%" in said


@pytest.mark.parametrize("content", ["", "{}", '{"fields": ["ttft_s"], "runs": []}', '{"fields": 3}'])
def test_a_file_that_is_no_result_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(Skipped, match=r"x\.json is no result"):
        reality.measure(Settings(reality=tmp_path / "x.json"), lambda words: None)


def test_a_step_that_cannot_run_says_why_and_fails_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent.json"
    assert sla.main(["--only", "reality", "--reality", str(absent), "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "skipped reality" in printed and "absent.json" in printed
    assert not list(tmp_path.glob("sla-*"))


def test_a_trace_that_is_missing_fails_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sla.main(["--only", "policies", "--traces", str(tmp_path), "--results", str(tmp_path)]) == 1
    assert "azure2023_conv.csv.gz" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--only", "everything"], ["--repeats", "0"], ["--real-s", "1"], ["--begin", "1"]])
def test_bad_options_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sla.main(flags)
    assert ended.value.code == 2 and flags[0] in capsys.readouterr().err
