"""`diptych plan`, run as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.plan.__main__ import main
from benchmarks.plan.options import build_parser, values_of
from benchmarks.plan.spec import spec_of

from .conftest import DECODE, PREFILL, make_values

SMALL: dict[str, Any] = {"duration_s": 4.0, "bounds": {"max_workers": 2}, "load": {"input_len": "50-400"}}


def written(folder: Path, **more: Any) -> str:
    file = folder / "plan.json"
    file.write_text(json.dumps(make_values(**SMALL | more)))
    return str(file)


def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("out.json", "values.yaml", "plot.png")}
    flags = ("--json", "out.json", "--values", "values.yaml", "--plot", "plot.png")
    named = [str(files[flag]) if flag in files else flag for flag in flags]
    assert main([written(tmp_path), "--no-progress", "--jobs", "1", *named]) == 0
    shown = capsys.readouterr().out
    assert "> one pool of 1" in shown and "Pick: one pool of 1, 1.00 an hour" in shown
    result = json.loads(files["out.json"].read_text())
    assert result["pick"]["decode"] == 1 and result["pick"]["prefill"] == 0
    assert all(0.0 <= one["interval"][0] <= one["attainment"] <= one["interval"][1] for one in result["candidates"])
    values = yaml.safe_load(files["values.yaml"].read_text())
    assert [pool["replicas"] for pool in values["decode"]["pools"].values()] == [
        1
    ] and "# Pick: one pool of 1" in files["values.yaml"].read_text()
    assert files["plot.png"].read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_plan(tmp_path: Path) -> None:
    results = []
    for number in range(2):
        file = tmp_path / f"{number}.json"
        assert main([written(tmp_path), "--no-progress", "--jobs", "1", "--seeds", "1", "--json", str(file)]) == 0
        results.append(json.loads(file.read_text()))
    assert results[0]["candidates"] == results[1]["candidates"]


@pytest.mark.slow
def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    results = []
    for jobs in ("1", "2"):
        file = tmp_path / f"{jobs}.json"
        assert main([written(tmp_path), "--no-progress", "--jobs", jobs, "--exhaustive", "--json", str(file)]) == 0
        results.append(json.loads(file.read_text()))
    assert results[0]["candidates"] == results[1]["candidates"]


def test_a_trace_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"2023-11-16 18:00:{number:02}.5,{200 + 10 * number},{5 + number}" for number in range(20))
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    file = written(tmp_path, duration_s=0.0, load={"rate": 0.0, "trace": str(trace)}, search={"seeds": 1})
    assert main([file, "--speedup", "4", "--jobs", "1", "--no-progress"]) == 0
    shown = capsys.readouterr().out
    assert "20 requests in 5 s" in shown and "> one pool of 1" in shown


def test_coefficients_that_err_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, decode={"coefficients": {"error": 0.4}}, search={"seeds": 1})
    assert main([file, "--jobs", "1", "--no-progress"]) == 0
    assert "coefficients of decode workers miss measured steps by 40%" in capsys.readouterr().out


def test_goals_out_of_reach_end_with_1_and_what_is_possible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, values = written(tmp_path, duration_s=1.5, bounds={"max_workers": 1}), tmp_path / "values.yaml"
    flags = ("--slo-ttft-ms", "10", "--seeds", "1", "--jobs", "1", "--no-progress", "--values", str(values))
    assert main([file, *flags]) == 1
    shown = capsys.readouterr().out
    assert "No candidate meets TTFT 10 ms" in shown and "TTFT: a goal of" in shown
    assert not values.exists() and "there is no pick" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    (
        ((), "prefill.coefficients"),
        (("--coefficients", "FILE"), "goals.ttft_ms"),
        (("--coefficients", "FILE", "--slo-ttft-ms", "5"), "load.rate"),
        (("--coefficients", "FILE", "--slo-ttft-ms", "5", "--trace", "/no/trace"), "/no/trace"),
        (("--coefficients", "FILE", "--slo-ttft-ms", "5", "--rate", "1", "--input-len", "9-2"), "load.input_len"),
        (("--coefficients", "/no/file"), "/no/file"),
        (("--from", "http://127.0.0.1:9"), "invalid --from http://127.0.0.1:9: must be a Diptych router"),
        (("--json", "/dev/null/x"), "invalid --json /dev/null/x: must be a file that can be written"),
        (("--jobs", "-1"), "invalid --jobs -1: must be a whole number from 0 to 1024"),
        (("--profile", "tiny-random", "--profile-s", "0"), "invalid --profile-s 0: must be a number from 1 to 3600"),
    ),
)
def test_bad_input_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "coefficients.json"
    file.write_text(json.dumps({"prefill": PREFILL, "decode": DECODE, "kv_bytes": 4096}))
    with pytest.raises(SystemExit) as end:
        main([*(str(file) if flag == "FILE" else flag for flag in flags), "--no-progress"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("diptych plan: ") and message in said and said.count("\n") == 1


def test_flags_win_over_the_file_and_coefficients_over_both(tmp_path: Path) -> None:
    file = tmp_path / "coefficients.json"
    file.write_text(json.dumps({"prefill": PREFILL | {"token_s": 1e-3}, "decode": DECODE, "kv_bytes": 4096}))
    flags = ["--coefficients", str(file), "--rate", "2", "--price-decode", "3", "--max-num-seqs", "8,16"]
    options = build_parser().parse_args([written(tmp_path), *flags, "--link-rate", "1e9", "--max-cost", "9"])
    spec = spec_of(values_of(options, lambda given: {}))
    assert (spec.load.rate, spec.decode.price, spec.bounds.max_cost) == (2.0, 3.0, 9.0)
    assert spec.search.max_num_seqs == (8, 16)
    assert spec.prefill.coefficients.token_s == 1e-3 and spec.prefill.num_blocks == 4096
    assert spec.prefill.link_rate == spec.decode.link_rate == 1e9
    assert spec.model.kv_bytes_per_token == 4096
