"""Real clusters beside the simulator: the same requests on both sides, numbers, ranks, calibration, one small run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.load.trace import TraceError, TraceRow
from benchmarks.reality import __main__ as reality
from benchmarks.reality import chance
from benchmarks.reality.loads import CASES, Case, LoadKind, workload_of, write_trace
from benchmarks.reality.numbers import Fate, Numbers, deviations, misses, pairs_ranked_alike
from benchmarks.reality.twin import Twin, alone_rows
from benchmarks.simulator.world.load import requests_of

CASE = Case("1P1D", 1, 1)


def fate(index: int, ttft_s: float, tpot_s: float = 0.01, outcome: str = "ok") -> Fate:
    return Fate(index, float(index), ttft_s, tpot_s, 11, 0, outcome)


def twin(**values: float) -> Twin:
    known = CASE.coefficients()
    return replace(Twin(CASE, "file", known.prefill, known.decode, known.kv_bytes, 0.0004), **values)


def test_both_sides_get_the_same_requests(tmp_path: Path) -> None:
    """Lengths, arrivals, and which blocks two prompts have in common."""
    rows = [TraceRow(0.0, 100, 5, (1, 2)), TraceRow(1.25, 140, 7, (1, 2, 3)), TraceRow(2.5, 90, 9, (1, 9))]
    scenario = twin().scenario(write_trace(rows, tmp_path / "t.jsonl"), policy="diptych", seed=3, id_tokens=64)
    simulated = requests_of(scenario)
    sent = [workload_of(rows, 64, seed=3).request(number) for number in range(3)]
    assert [request.arrival_s for request in simulated] == [row.arrival_s for row in rows]
    assert [request.output_len for request in simulated] == [plan.output_len for plan in sent]
    hashes = [request.content.of_prompt(16) for request in simulated]
    for one in range(3):
        assert simulated[one].content.num_prompt_tokens == sent[one].input_len == len(sent[one].prompt)
        for other in range(one):
            same = sum(a == b for a, b in zip(hashes[one], hashes[other], strict=False))
            shared = sum(1 for _ in common_prefix(sent[one].prompt, sent[other].prompt))
            assert same == min(shared, len(sent[one].prompt) // 16 * 16, len(sent[other].prompt) // 16 * 16) // 16
    assert len(hashes[0]) == 6 and hashes[0][4:] == hashes[1][4:6] != hashes[2][4:5]


def common_prefix(one: list[int] | str, other: list[int] | str) -> list[object]:
    found: list[object] = []
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        found.append(a)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_load_is_a_share_of_the_prefill_pool(case: Case, tmp_path: Path) -> None:
    load = LoadKind("synthetic", used=0.5)
    rows = load.rows(case, 40.0, tmp_path, seed=1)
    assert rows == load.rows(case, 40.0, tmp_path, seed=1) != load.rows(case, 40.0, tmp_path, seed=2)
    prefill = case.coefficients().prefill
    busy_s = sum(row.input_len * prefill.token_s for row in rows)
    assert 0.65 < busy_s / (0.5 * 40.0 * case.prefill) < 1.05  # the rest: what each step takes beside its tokens
    assert 38.0 < rows[-1].arrival_s < 40.0
    with pytest.raises(TraceError, match="synthetic: 100000 s"):
        load.rows(case, 100_000.0, tmp_path, seed=1)


def test_goodput_counts_what_met_both_goals() -> None:
    fates = [fate(0, 0.1), fate(1, 0.9), fate(2, 0.1, 0.2), fate(3, math.nan, math.nan, "refused")]
    found = Numbers.of(fates, ttft_ms=500.0, tpot_ms=50.0)
    assert (found.num_requests, found.num_ok, found.num_good) == (4, 3, 1)
    assert found.seconds == pytest.approx(2.0 + 0.1 + 10 * 0.2)
    assert found.goodput == pytest.approx(1 / found.seconds)
    assert found.ttft_ms.p50 == pytest.approx(100.0)
    assert fates[3].as_row() == [3, 3.0, None, None, 11, 0, "refused"]


def test_deviations_beyond_the_marks_are_named() -> None:
    real = Numbers.of([fate(number, 0.1 + number / 1000) for number in range(20)], 500.0, 50.0)
    slower = Numbers.of([fate(number, 0.12 + number / 1000, 0.0104) for number in range(20)], 500.0, 50.0)
    shares = deviations(real, slower)
    assert shares["TPOT p50"] == pytest.approx(0.04)
    assert misses(shares) == ["TTFT p50", "TTFT p99"]
    assert misses(deviations(real, real)) == []
    assert misses({"TTFT p90": 9.0, "goodput": -0.051}) == ["goodput"]


def test_policies_are_ranked_by_goodput_and_then_by_ttft() -> None:
    def numbers(ttft_s: float, num_good: int) -> Numbers:
        return Numbers.of([fate(number, ttft_s if number < num_good else 9.0) for number in range(20)], 500.0, 50.0)

    best, equal, worst = numbers(0.1, 20), numbers(0.2, 20), numbers(0.1, 10)
    real = {"a": best, "b": equal, "c": worst}
    assert pairs_ranked_alike(real, real) == (3, 3)
    assert pairs_ranked_alike(real, {"a": equal, "b": best, "c": worst}) == (2, 3)
    assert pairs_ranked_alike(real, {"a": best, "b": best, "c": worst}) == (3, 3)
    assert pairs_ranked_alike(real, {"a": worst, "b": equal, "c": best}) == (0, 3)


def test_calibration_finds_what_a_cluster_needs_beside_its_steps(tmp_path: Path) -> None:
    """The cluster is a simulation that knows more."""
    slow = CASE.coefficients().decode
    real = twin(link_s=0.004, ingress_s=0.003, ingress_token_s=2e-6)
    real = replace(real, decode=type(slow)(**{**as_dict(slow), "fixed_s": slow.fixed_s + 0.002}))
    alone = real.simulate(alone_rows(), tmp_path, policy="diptych", seed=0)
    found = twin().calibrated(alone, tmp_path, steps=True)
    assert found.link_s == pytest.approx(0.004, abs=1e-6)
    assert found.ingress_s == pytest.approx(0.003, abs=1e-6)
    assert found.prefill.token_s == pytest.approx(CASE.coefficients().prefill.token_s + 2e-6)
    assert found.decode.fixed_s == pytest.approx(slow.fixed_s + 0.002, abs=1e-6)
    plain = twin().calibrated(alone, tmp_path, steps=False)
    assert (plain.prefill, plain.decode) == (twin().prefill, slow)
    assert plain.ingress_token_s == pytest.approx(2e-6, rel=1e-3)


def as_dict(coefficients: object) -> dict[str, float]:
    return msgspec.structs.asdict(coefficients)  # type: ignore[arg-type]


@pytest.mark.e2e
def test_a_small_cluster_is_compared(tmp_path: Path, forge: None) -> None:
    """Every request has an end on both sides, the same number of tokens, and raw values in the file."""
    output = tmp_path / "reality.json"
    argv = ["--cases", "1P1D", "--loads", "synthetic", "--policies", "random", "--seconds", "3"]
    assert reality.main([*argv, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert [run["policy"] for run in found["runs"]] == ["diptych", "random"]
    place = {name: number for number, name in enumerate(found["fields"])}
    for run in found["runs"]:
        assert set(run["simulated"]) == {"file", "fit"}
        sides = [run["real"], *run["simulated"].values()]
        tokens = [[row[place["num_tokens"]] for row in sorted(side["requests"])] for side in sides]
        assert len(tokens[0]) == len(tokens[1]) == len(tokens[2]) > 10
        served = [row for row in zip(*tokens, strict=True) if row[0]]  # a busy machine refuses some
        assert all(real == file == fit for real, file, fit in served) and len(served) > 5
        assert all(row[place["outcome"]] == "ok" for side in sides for row in side["requests"])
    assert all(twin["ingress_s"] >= 0.0 and twin["message_s"] > 0.0 for twin in found["twins"])
    drawn = tmp_path / "chance.json"
    assert chance.main([str(output), "--draws", "2", "--output", str(drawn)]) == 0
    ranges = json.loads(drawn.read_text())["runs"]
    assert [one["source"] for one in ranges] == ["file", "fit", "file", "fit"]
    assert all(0.0 < one["draws"]["TTFT p99"][0] <= one["draws"]["TTFT p99"][2] for one in ranges)
