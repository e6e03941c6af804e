"""The GPU benchmark goes all its ways on the CPU; and its gate sees what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.case import words_of
from benchmarks.gpu.chip import Chip, numbered
from benchmarks.gpu.gate import difference, poisoned
from benchmarks.gpu.shape import DRY, LLAMA_8B
from benchmarks.time_limit import TimeOver, time_limit


@pytest.mark.interpret
@pytest.mark.timeout(400)
def test_a_dry_run_checks_and_measures_everything(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    program = [sys.executable, "-P", "-m", "benchmarks.gpu", "--dry-run", f"--output={output}"]
    command = [*program, "--only", *gpu.SECTIONS, *gpu.MORE_SECTIONS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=environment)
    assert done.returncode == gpu.OK, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["dry_run"] and set(found["problems"].values()) == {""}
    assert {row["kernel"] for row in found["kernels"]} >= {"decode attention", "prefill attention", "top-k and top-p"}
    peers = {"attention": "torch sdpa", "product": "cuBLAS, floats"}
    for word, peer in peers.items():
        rows = [row for row in found["kernels"] if word in row["kernel"]]
        assert rows and all(isinstance(row["peers_us"][peer], float) for row in rows)
    assert {row["how"] for row in found["engine"]["decode"]} == {"kernel by kernel", "recorded"}
    assert [row["arm"] for row in found["serving"]] == ["aggregated", "1P1D"]
    assert all(row["gb_per_s"] > 0 for row in found["transfer"])
    assert {row["problem"] for row in found["tiles"]} == {""} and len({row["tiles"] for row in found["tiles"]}) > 2
    assert "flashinfer" in done.stdout and "1P1D" in done.stdout


BROKEN = """
import sys
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import suite as gpu_suite

def check(suite):
    suite.problems["a kernel"] = "off by 7"

def ship(*_):
    raise RuntimeError("the cable is cut")

gpu_suite.Suite.check, gpu_suite.measure_transfer = check, ship
gpu_suite.measure_serving = lambda *_, **__: [{"arm": "aggregated"}]
if "checked" in sys.argv:
    gpu_suite.Suite.check = lambda suite: None
raise SystemExit(gpu.main(["--dry-run", "--only", "transfer", "serving", f"--output={sys.argv[1]}"]))
"""


@pytest.mark.interpret
@pytest.mark.parametrize("passed", [True, False])
def test_what_fails_is_told_and_the_rest_is_measured(tmp_path: Path, passed: bool) -> None:
    output = tmp_path / "gpu.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-P", "-c", BROKEN, str(output), *(["checked"] if passed else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    found = json.loads(output.read_text())
    assert done.returncode == gpu.WRONG and found["chip"]["copy_rate"] > 0
    assert found["errors"].pop("transfer") == "RuntimeError: the cable is cut" and "FAILED  transfer" in done.stdout
    if passed:  # what came after it
        assert found["serving"] == [{"arm": "aggregated"}] and not found["errors"]
    else:
        assert "serving" not in found and "a kernel" in found["errors"]["serving"]


STOPPED = """
import os, signal, sys, time
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import suite as gpu_suite

def check(suite):
    suite._note("gather blocks, of 16", lambda: "the bytes differ")
    suite._note("top-k and top-p", lambda: 1 / 0)

def ship(*_):
    yield {"path": "first", "gb_per_s": 7.0}
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(90)

gpu_suite.Suite.check, gpu_suite.measure_transfer = check, ship
gpu_suite.measure_engine = lambda *_: iter([("decode", {"batch": 1})])
options = ["--skip", "top-k", "--only", "engine", "transfer", "serving"]
raise SystemExit(gpu.main(["--dry-run", *options, f"--output={sys.argv[1]}"]))
"""


@pytest.mark.interpret
def test_what_was_found_before_the_end_is_kept(tmp_path: Path) -> None:
    """Told to end, as by the time limit, it says what it has. What serving does not run need not be right."""
    output = tmp_path / "gpu.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-P", "-c", STOPPED, str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=environment)
    found = json.loads(output.read_text())
    assert done.returncode == gpu.WRONG, done.stdout + done.stderr
    assert found["problems"] == {"gather blocks, of 16": "the bytes differ"}
    assert found["engine"] == {"prefill": [], "decode": [{"batch": 1}]}
    assert found["transfer"] == [{"path": "first", "gb_per_s": 7.0}] and "serving" not in found
    assert found["errors"] == {"end": "TimeOver: told to end"} and "first" in done.stdout


def test_a_limit_comes_and_goes_with_its_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TimeOver, match="the limit of 0.01 s"), time_limit(0.01):
        time.sleep(60)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes no device current that has none."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert numbered(torch.device("cuda")) == torch.device("cuda:2")
    assert numbered(torch.device("cuda:1")) == torch.device("cuda:1")


def test_an_error_of_many_lines_is_told_by_its_ends() -> None:
    error = ValueError("at 3:4:\n    x = y\n        ^\ny is not defined\n")
    assert words_of(error) == "ValueError: at 3:4: ... y is not defined"
    assert words_of(KeyError()) == "KeyError: no message"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == gpu.NO_GPU
    assert "no CUDA device" in capsys.readouterr().out


def test_the_floor_is_the_larger_of_two() -> None:
    chip = Chip("chip", copy_rate=1e12, matmul_rate=1e14)
    assert chip.floor(2e12, 1e14) == pytest.approx(2.0)
    assert chip.floor(1e12, 3e14) == pytest.approx(3.0)


def test_the_gate_sees_numbers_that_are_off_missing_or_misshapen() -> None:
    expected = torch.randn(40, 8, dtype=torch.float64)
    right = expected.float()
    assert difference(right, expected, torch.float32) == ""
    assert difference(right.bfloat16(), expected, torch.bfloat16) == ""
    assert "off by" in difference(right.bfloat16(), expected, torch.float32)
    wrong = right.clone()
    wrong[3, 5] += 0.5
    assert "off by" in difference(wrong, expected, torch.bfloat16)
    wrong[3, 5] = float("nan")
    assert "1 of 320 numbers are not finite" in difference(wrong, expected, torch.float32)
    assert "shape" in difference(right[1:], expected, torch.float32)
    small = expected / 100
    assert difference(small.bfloat16(), small, torch.bfloat16) == ""
    assert "of its norm" in difference(small * 0.9, small, torch.bfloat16)


def test_new_memory_is_poisoned_inside_only() -> None:
    original = torch.empty
    with poisoned():
        assert torch.empty(3, 2).isnan().all() and torch.empty_like(torch.zeros(2)).isnan().all()
        assert torch.empty(2, dtype=torch.int64).dtype == torch.int64
    assert torch.empty is original


def test_the_shapes_are_what_their_configuration_says() -> None:
    assert LLAMA_8B.matrix_elements + LLAMA_8B.vocab_size * LLAMA_8B.hidden == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_8B.token_bytes * LLAMA_8B.num_layers * LLAMA_8B.block_size == 8 * 2**20
    assert DRY.config.vocab_size == DRY.hugging_face()["vocab_size"]
