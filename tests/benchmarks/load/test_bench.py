import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.load import command as bench
from benchmarks.load.arrivals import RateProfile
from benchmarks.load.config import BenchConfig
from common.config.sources import read

from ...rig import Program
from ..conftest import ScriptedServer

QUICK = ["--num-requests", "6", "--input-len", "4-8", "--output-len", "3", "--seed", "1"]


def run(server: ScriptedServer, *flags: str) -> int:
    return bench.main(["--url", server.url, *QUICK, *flags])


def test_closed_loop_writes_json_and_plot(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, picture = tmp_path / "r.json", tmp_path / "sub" / "r.png"
    flags = ("--concurrency=3", "--slo-ttft-ms=60000", "--api-key=hidden", f"--output={output}", f"--plot={picture}")
    assert run(server, *flags) == 0
    written = json.loads(output.read_text())
    assert written["summary"]["outcomes"] == {"ok": 6}
    assert written["summary"]["num_good"] == 6
    assert written["conditions"]["seed"] == 1
    assert len(written["requests"]) == 6
    assert "hidden" not in output.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "TTFT" in printed
    assert "goodput" in printed


@pytest.mark.parametrize(
    "flags",
    [
        ("--rate=500",),
        ("--rate=inf",),
        ("--endpoint=chat",),
        ("--prompt-text",),
        pytest.param(("--ramp=5:90", "--duration-s=1"), marks=pytest.mark.slow),
    ],
)
def test_other_loads(server: ScriptedServer, flags: tuple[str, ...]) -> None:
    assert run(server, *flags) == 0


def test_a_trace_sets_lengths(server: ScriptedServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [3, 4]}\n' * 3)
    assert bench.main(["--url", server.url, f"--trace={trace}", "--speedup=10", "--warmup=0"]) == 0
    prompts = [body["prompt"] for body in server.bodies[-3:]]
    assert [len(prompt) for prompt in prompts] == [600] * 3
    assert prompts[0] == prompts[1]


@pytest.mark.slow
def test_duration_bounds_the_run(server: ScriptedServer) -> None:
    before = len(server.bodies)
    assert bench.main(["--url", server.url, "--duration-s=1.0", "--output-len=2", "--concurrency=2"]) == 0
    assert len(server.bodies) > before + 2


@pytest.mark.slow
def test_a_rate_that_changes_ends_with_its_profile(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    flags = ["--rates=100x0.2,0x0.2,100-200x0.2", "--output-len=1", "--warmup=0", f"--output={output}"]
    assert bench.main(["--url", server.url, "--seed=3", "--num-requests=0", *flags]) == 0
    starts = [request["start_s"] for request in json.loads(output.read_text())["requests"]]
    expected = RateProfile.steps("100x0.2,0x0.2,100-200x0.2").arrivals(3)
    assert len(starts) == len(list(expected)) > 20


@pytest.mark.slow
def test_find_rate_says_that_no_rate_holds(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer of "late" takes 20 ms, however few there are."""
    output, picture = tmp_path / "r.json", tmp_path / "r.png"
    goals = ["--slo-ttft-ms=1", "--num-requests=20", f"--output={output}", f"--plot={picture}"]
    assert run(server, "--find-rate", "--model=late", *goals) == 1
    assert (
        "none: even one request at a time had fewer than 0.95 of requests within TTFT 1 ms" in capsys.readouterr().out
    )
    written = json.loads(output.read_text())
    assert written["answer"] == {"rate": 0.0, "lowest_missed": 0.0}
    assert [probe["rate"] for probe in written["probes"]] == [0.0]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_find_rate_finds_the_capacity(server: ScriptedServer, tmp_path: Path) -> None:
    """Model "turns" serves one request at a time, 20 ms each: more than 50 a second cannot be served."""
    output = tmp_path / "r.json"
    flags = ["--find-rate", "--model=turns", "--slo-ttft-ms=400", "--slo-quantile=0.9", "--rate=10"]
    load = ["--output-len=1", "--num-requests=20", "--rate-tolerance=0.8", "--warmup=1", f"--output={output}"]
    assert bench.main(["--url", server.url, "--seed=1", *flags, *load]) == 0
    written = json.loads(output.read_text())
    assert 0 < written["answer"]["rate"] <= 60
    assert written["answer"]["lowest_missed"] <= 1.8 * written["answer"]["rate"] + 1e-3
    assert all(probe["num"] >= 20 for probe in written["probes"][1:] if probe["holds"])


def test_all_failed_is_a_failure(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--model=busy") == 1
    assert "6 x http 503 no worker" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate=0"], "invalid --rate 0: must be a number above 0, or inf"),
        (["--rate=1", "--concurrency=1"], "must be omitted with --concurrency"),
        (["--rates=1x2", "--ramp=1:2"], "must be omitted with --ramp"),
        (["--rates=1x2,3"], "parts such as 2x30"),
        (["--rates=0x2"], "at least one rate must be above 0"),
        (["--ramp=1:2"], "invalid --duration-s 0: must be above 0 with --ramp"),
        (["--burst=1:9x30", "--duration-s=20"], "does not fit into 20 s"),
        (["--find-rate"], "above 0 with --find-rate"),
        (["--find-rate", "--slo-ttft-ms=9", "--concurrency=2"], "except a finite --rate"),
        (["--slo-quantile=1"], "invalid --slo-quantile 1: must be 0.01 to 0.9999"),
        (["--rate=inf", "--num-requests=0"], "invalid --num-requests 0: must be at least 1"),
        (["--input-len=9-3"], "invalid --input-len 9-3: must be a length"),
        (["--shared-prefix-len=5"], "at most the shortest prompt, 4"),
        (["--url=nowhere"], "an http:// or https:// URL"),
        (["--trace=absent.csv"], "absent.csv"),
        (["--output=/dev/null/x"], "invalid --output /dev/null/x: must be a file that can be written"),
        (["--nonsense"], "unknown option --nonsense; diptych bench --help-all lists all options"),
    ],
)
def test_refused_settings(
    server: ScriptedServer, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(server, *flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_settings_from_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text('[bench]\nrate = "3"\ninput_len = "9-12"\n')
    config = read(BenchConfig, ["--config", str(path), "--output-len=7"], environ={"DIPTYCH_BENCH_RATE": "5"})
    assert (config.rate, config.input_len, config.output_len) == ("5", "9-12", "7")


@pytest.mark.slow
def test_an_interrupt_reports_what_was_measured(
    server: ScriptedServer, tmp_path: Path, launch: Callable[..., Program]
) -> None:
    before = len(server.bodies)
    output = tmp_path / "r.json"
    flags = ["--url", server.url, "--model=slow", "--output-len=4", "--concurrency=2", "--warmup=0"]
    load = launch(sys.executable, "-P", "-m", "benchmarks.load.command", *flags, f"--output={output}")
    while len(server.bodies) < before + 6:
        assert load.alive, load.describe_end()
        time.sleep(0.01)
    load.send_signal(signal.SIGINT)
    load.wait(time.monotonic() + 60)
    assert load.returncode == 130, load.describe_end()
    assert "interrupted; measured so far" in load.output()
    assert json.loads(output.read_text())["summary"]["outcomes"]["ok"] >= 2
