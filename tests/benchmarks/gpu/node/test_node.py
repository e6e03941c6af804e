"""`make gpu`: every part runs on a CPU, each finding has its verdict, and what is wrong is FAIL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.gpu.chip import Chip
from benchmarks.gpu.interpreter import products_by_row
from benchmarks.gpu.node import FIRST, PARTS, SECOND, boxes, launches, verdict
from benchmarks.gpu.node import __main__ as node
from benchmarks.gpu.node.boxes import box_rows, of_boxes, refused_by
from benchmarks.gpu.node.families import FAMILIES, of_family
from benchmarks.gpu.node.graphs import of_bucket
from benchmarks.gpu.node.invariance import of_invariance
from benchmarks.gpu.node.landing import of_landing
from benchmarks.gpu.node.launches import SHORT, count, of_launches, of_model
from benchmarks.gpu.node.options import FAILED, LIMIT_S, NO_GPU, PASSED, parse
from benchmarks.gpu.node.ranks import of_ranks, too_few
from benchmarks.gpu.shape import DRY, LLAMA_8B
from benchmarks.gpu.timer import Timer
from common.config.worker import BLOCK_SIZES
from kernels.gpu.tiles import chip as chips

QUICK = ("chip", "agreement", "engine")
BARE = ("engine", "kernels")
"""Parts for which torch and Triton suffice."""
OTHERS = (
    "msgspec", "llguidance", "tokenizers", "zmq", "xxhash", "httpx", "rich", "orjson", "gguf", "jinja2", "msgpack",
    "prometheus_client", "safetensors", "uvloop", "matplotlib",
)  # fmt: skip
"""Packages that a GPU machine's Python may miss."""


def dry_run(
    folder: Path, *parts: str, options: Sequence[str] = (), **environ: str
) -> tuple[subprocess.CompletedProcess[str], list[str], dict[str, Any]]:
    """The process that ended, its lines of verdicts, and the JSON file."""
    program = [sys.executable, "-P", "-m", "benchmarks.gpu.node", "--dry-run", f"--out={folder}"]
    command = [*program, "--time-limit-s=0", *options, "--parts", *parts]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)
    assert (folder / "gpu.json").exists(), done.stdout + done.stderr
    lines = (folder / "verdicts.txt").read_text().splitlines()
    return done, lines, json.loads((folder / "gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_a_dry_run_tells_the_most_important_first(tmp_path: Path) -> None:
    done, lines, found = dry_run(tmp_path / "out", *QUICK)
    assert done.returncode == PASSED, done.stdout + done.stderr
    assert [line.split()[0] for line in lines].count("FAIL") == 0
    parts = [one["part"] for one in found["verdicts"]]
    assert list(dict.fromkeys(parts)) == list(QUICK) and [one["line"] for one in found["verdicts"]] == lines
    assert found["agreement"][0]["kernels"] == 12 and not found["agreement"][0]["problems"]
    assert {row["how"] for row in found["engine"]["decode"]} == {"kernel by kernel", "recorded"}
    assert (tmp_path / "out" / "gpu.png").stat().st_size > 10_000
    assert all(line in done.stdout for line in lines)


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_a_dry_run_of_the_kernels(tmp_path: Path) -> None:
    parts = ("kernels", "quantised", "moe", "mla", "graphs", "invariance", "boxes", "launches", "tiles")
    done, lines, found = dry_run(tmp_path / "out", *parts)
    assert done.returncode == PASSED, done.stdout + done.stderr
    assert set(found["problems"].values()) == {""} and not found["errors"]
    assert list(dict.fromkeys(one["part"] for one in found["verdicts"])) == ["chip", *parts[:-1]]
    assert {row["kernel"] for row in found["kernels"]} >= {"decode attention", "prefill attention", "top-k and top-p"}
    peers = {"kernels": "torch sdpa", "quantised": "scaled_mm, fp8 inputs", "moe": "grouped_mm", "mla": "torch sdpa"}
    for part, peer in peers.items():
        timed = [row["peers_us"][peer] for row in found[part] if peer in row["peers_us"]]
        assert timed and all(isinstance(one, float) for one in timed), part
    on_chips = {"cuDNN sdpa", "varlen_attn", "flashinfer", "fa3"}
    attention = [row for row in found["kernels"] if row["kernel"] in ("decode attention", "prefill attention")]
    assert all(on_chips < set(row["peers_us"]) for row in attention)
    assert [row["bucket"] for row in found["graphs"]] == [1, 2]
    assert [row["case"] for row in found["boxes"]] == ["awkward lengths", "9 tokens"]
    assert found["boxes"][1]["different"] == 0 and found["boxes"][1]["boxes_us"] > 0
    assert {row["problem"] for row in found["tiles"]} == {""} and len({row["tiles"] for row in found["tiles"]}) > 2
    counted = {(row["how"], row["batch"]): row for row in found["launches"]}
    assert set(counted) == {(how, batch) for how in ("kernel by kernel", "recorded") for batch in DRY.decode_batches}
    assert all(row["kernels"] > row["kernels_of_a_layer"] > 0 == row["calls"] for row in counted.values())
    assert "PASS  kernels: attention of awkward lengths: agrees (the reference's numbers)" in lines


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_a_dry_run_of_everything_else(tmp_path: Path) -> None:
    done, lines, found = dry_run(tmp_path / "out", "transfer", "ipc", "serving", "landing", "families")
    assert done.returncode == PASSED, done.stdout + done.stderr
    assert found["landing"][0]["transfers"] > 1 and found["landing"][0]["tokens"] > 0
    assert [row["arm"] for row in found["serving"]] == ["1P1D", "aggregated"]
    assert all(row["gb_per_s"] > 0 for row in found["transfer"])
    assert [line for line in lines if line.startswith("SKIP  serving: 1P1D")]
    with tarfile.open(tmp_path / "out" / "logs.tgz") as logs:
        assert {"1P1D/decode-0.log", "1P1D/prefill-0.log"} <= set(logs.getnames())
    assert not (tmp_path / "out" / "workers").exists()


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_torch_and_triton_suffice_for_the_first_parts(tmp_path: Path) -> None:
    """And what cannot be imported is a verdict of the part that needs it."""
    hidden = tmp_path / "hidden"
    for name in OTHERS:
        (hidden / name).mkdir(parents=True)
        (hidden / name / "__init__.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\")\n")
    skip = ("--skip", "experts", "invariant", "sums", "gather", "scatter", "seats", "top-k", "greedy", "rotate", "norm")
    done, lines, found = dry_run(
        tmp_path / "out", *BARE, "transfer", "serving", options=(*skip, "silu"), PYTHONPATH=str(hidden)
    )
    assert done.returncode == FAILED, done.stdout + done.stderr
    assert found["chip"] and found["engine"]["decode"] and found["kernels"] and "no picture" in done.stdout
    failed = [line for line in lines if line.startswith("FAIL")]
    assert [line.partition(" (")[0].partition(": No")[0] for line in failed] == [
        "FAIL  transfer: the part itself",
        "FAIL  serving: the part itself",
    ]
    assert all("No module named" in line for line in failed)


BROKEN = """
import os, signal, sys, time
from benchmarks.gpu.node import run

def hang(self):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    self.found["families"] = ["begun"]
    self.save()
    while True:
        time.sleep(0.1)

def raise_(self):
    self.judge_rows("ipc", [{"path": "first", "gb_per_s": 30.0}], run.verdict.of_ipc)
    raise RuntimeError("the cable is cut")

parts = run.PartsRun
parts.measure_chip = lambda self: None
parts.check_graphs = lambda self: os.kill(os.getpid(), signal.SIGSEGV)
parts.check_ipc = raise_
parts.check_landing = lambda self: time.sleep(60)
parts.check_invariance = hang
run.seconds_of = lambda name, options: 1.0 if name == "landing" else 0.0
sys.exit(run.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.timeout(300)
def test_a_part_that_fails_hangs_or_crashes_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    monkeypatch.setattr(node, "RUNNER", ("-P", str(script)))
    monkeypatch.setattr(node, "GRACE_S", 2.0)
    monkeypatch.setattr(node, "seconds_of", lambda name, options: 1.0 if name == "invariance" else 0.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    out = tmp_path / "out"
    parts = ("chip", "graphs", "ipc", "landing", "invariance", "families")
    assert node.main(["--dry-run", f"--out={out}", "--time-limit-s=0", "--parts", *parts]) == FAILED
    assert (out / "verdicts.txt").read_text().splitlines() == [
        "FAIL  graphs: the part itself: ended its process with SIGSEGV (a normal exit)",
        "PASS  ipc: first: 30.0 GB/s (at least 20)",
        "FAIL  ipc: the part itself: RuntimeError: the cable is cut (no error)",
        "FAIL  landing: the part itself: stopped at its deadline of 1 s (no error)",
        "FAIL  invariance: the part itself: did not stop within 2 s of its deadline (a normal exit)",
    ]
    found = json.loads((out / "gpu.json").read_text())
    assert list(found["seconds"]) == ["chip", "ipc", "landing", "families"]  # what came after each


def test_what_was_not_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert node.main(["--dry-run", f"--out={out}", "--time-limit-s=5", "--parts", "mla"]) == FAILED
    assert (out / "verdicts.txt").read_text().splitlines() == [
        "SKIP  chip: the part itself: not run (the time limit was reached)",
        "SKIP  mla: the part itself: not run (the time limit was reached)",
    ]


@pytest.mark.slow
def test_without_triton_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\")\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert node.main(["--dry-run", f"--out={tmp_path / 'out'}", "--parts", "chip"]) == FAILED
    told = (tmp_path / "out" / "verdicts.txt").read_text()
    assert told == "FAIL  chip: the part itself: No module named 'triton' (torch and Triton)\n"


def test_parts_run_in_their_order_and_in_halves() -> None:
    assert list(FIRST)[:4] == ["chip", "agreement", "engine", "kernels"]
    assert parse(["--parts", "second"]).parts == ["chip", *SECOND]
    assert parse(["--parts", "mla", "engine"]).parts == ["chip", "engine", "mla"]
    assert parse([]).parts == list(PARTS) and "tiles" not in PARTS
    for half in (FIRST, SECOND):
        assert sum(half.values()) <= LIMIT_S  # within a command of ten minutes, to its last part


def test_too_many_kernels_are_packed_without_what_triton_does_not_load(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / "key").mkdir(parents=True)
    for name in ("k.cubin", "k.json", "k.ttgir"):
        (folder / "key" / name).write_bytes(os.urandom(100))
    options = parse([f"--out={tmp_path}"])
    run = node.Run(options, [], Path(tempfile.mkdtemp(dir=tmp_path)))
    run._pack("all", folder)
    node.pack(tmp_path / "few.tgz", folder, node.SMALL_KINDS)
    with tarfile.open(tmp_path / "all.tgz") as every, tarfile.open(tmp_path / "few.tgz") as few:
        assert sorted(every.getnames()) == ["key/k.cubin", "key/k.json", "key/k.ttgir"]
        assert sorted(few.getnames()) == ["key/k.cubin", "key/k.json"]


def test_a_row_of_a_tile_keeps_its_bits_at_any_place() -> None:
    """In the interpreter, whose numpy may multiply rows by eights and the last ones otherwise, as on AMD's CPUs."""
    with products_by_row():
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

        a, b = (np.random.default_rng(i).normal(size=(32, 32)).astype(np.float32) for i in range(2))
        zeros = TensorHandle(np.zeros((32, 32), np.float32), tl.float32)

        def product(rows: Any) -> Any:
            handles = (TensorHandle(one, tl.float32) for one in (rows, b))
            return InterpreterBuilder.create_dot(None, *handles, zeros, None, 0).data  # type: ignore[arg-type]

        whole = product(a)
        for places in (1, 3, 13, 19):
            assert np.array_equal(product(np.roll(a, places, 0)), np.roll(whole, places, 0))
        assert np.allclose(whole, a @ b, atol=1e-4)


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_a_dry_run_of_two_ranks(tmp_path: Path) -> None:
    done, lines, found = dry_run(tmp_path / "out", "ranks")
    assert done.returncode == PASSED, done.stdout + done.stderr
    (row,) = found["ranks"]
    assert row["tokens"] == 200 and not row["other_tokens"]
    assert lines[-1].startswith("PASS  ranks: recorded steps of two ranks: 0 of 200 tokens differ")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert node.main([f"--out={tmp_path / 'out'}"]) == NO_GPU
    assert "No CUDA device" in capfd.readouterr().out and not (tmp_path / "out" / "verdicts.txt").exists()


def test_a_slow_chip_fails_and_an_unknown_one_is_not_judged() -> None:
    fast = list(verdict.of_chip(Chip("NVIDIA H200", 4.3e12, 700e12)))
    slow = list(verdict.of_chip(Chip("NVIDIA H200", 3.0e12, 300e12)))
    assert [one.ok for one in (*fast, *slow)] == [True, True, False, False]
    assert str(slow[0]) == "FAIL  chip: copy: 3,000.0 GB/s (at least 3,840)"
    assert all(str(one).startswith("SKIP") for one in verdict.of_chip(Chip("CPU", 1e10, 1e10)))


def test_a_kernel_is_judged_by_its_floor_and_by_the_fastest_peer() -> None:
    row = {"kernel": "decode attention", "size": "8 x 4,096", "us": 100.0, "of_floor": 0.72}
    rows = [row | {"peers_us": {"torch sdpa": 400.0, "flashinfer": 80.0, "fa3": "ImportError: none"}}]
    by_floor, by_peer = verdict.of_kernel("kernels", rows[0])
    assert by_floor.ok and not by_peer.ok and "vs. flashinfer" in by_peer.what
    assert by_peer.found == "1.25 times its time"
    goals = [
        {"kernel": "decode attention", "size": "32 x 4,096", "of_floor": 0.89},
        {"kernel": "prefill attention", "size": "8,192", "of_floor": 0.66},
    ]
    judged = [next(verdict.of_kernel("kernels", goal | {"peers_us": {}})) for goal in goals]
    assert [one.ok for one in judged] == [False, True]
    faster = {
        "kernel": "product in fp8",
        "size": "1",
        "us": 9.0,
        "of_floor": 0.9,
        "peers_us": {verdict.OTHER_WORK[0]: 1.0},
    }
    assert len([*verdict.of_kernel("quantised", faster)]) == 1  # a peer that does other work is not judged


def test_steps_transfers_and_the_service_are_judged() -> None:
    assert next(verdict.of_step("prefill", {"tokens": 8192, "of_matmul_rate": 0.6})).ok
    step = {"batch": 8, "context": 4096, "skipped": "", "ms": 2.5, "tokens_per_s": 3200.0, "times_floor": 1.16}
    assert str(next(verdict.of_step("decode", step | {"how": "recorded"}))) == (
        "FAIL  engine: recorded, 8 rows of 4,096: 2.500 ms, 3,200 tokens/s, 1.16 times the floor (at most 1.15)"
    )
    assert next(verdict.of_step("decode", step | {"how": "kernel by kernel"})).skipped
    large = {"how": "recorded", "batch": 256, "context": 1024, "skipped": "4,352 blocks do not fit"}
    assert str(next(verdict.of_step("decode", large))).startswith("SKIP  engine: recorded, 256 rows of 1,024: not meas")
    paths = [{"path": "device to pinned", "gb_per_s": 9.0, "one_block": 3.0}, {"path": "raw", "gb_per_s": 2.0}]
    paths += [{"path": "KV", "gb_per_s": 2.0, "of_raw": 0.8}]
    assert [one.ok for one in verdict.of_transfer(paths)] == [False, True]
    ring = {"path": "KV through a ring", "gb_per_s": 11.0, "direct": True}
    rings = [ring, ring | {"gb_per_s": 9.0}, ring | {"direct": False}]
    assert [one.ok for one in verdict.of_transfer(rings)] == [True, False, False]
    ipc = {"path": "KV by CUDA IPC", "gb_per_s": 20.0, "ipc": True}
    killed = {"path": "a killed owner", "rounds": 9, "wrong": 0, "problem": "", "survived": True}
    dead = killed | {"wrong": 2, "problem": "RuntimeError: unspecified launch failure", "survived": False}
    judged = [verdict.of_ipc(row) for row in (ipc, ipc | {"gb_per_s": 19.0}, killed, dead)]
    assert [one.ok for one in judged] == [True, False, True, False]
    assert judged[-1].found == "9 rounds, 2 other blocks RuntimeError: unspecified launch failure"
    hidden = list(verdict.of_hiding([*paths, ring], 1e10))
    assert [str(one) for one in hidden] == [
        "PASS  transfer: hidden behind prefill, KV through a ring: 110% of 10.00 GB/s of KV that prefill makes"
        " (at least 100%)"
    ]
    assert not next(verdict.of_hiding(paths, 1e10)).ok and not list(verdict.of_hiding(paths, 0.0))
    arm = {"arm": "1P1D", "requests": 8, "output_tokens_per_s": 9.0, "ttft_p50_ms": 9.0, "tpot_p50_ms": 21.0}
    assert [verdict.of_serving(arm, step).ok for step in (0.0, 10.0, 11.0)] == [True, False, True]


def test_anything_that_a_transfer_changes_is_a_failure() -> None:
    good = {"seconds": 60.0, "replays": 9, "transfers": 3, "paths": 2, "failure": ""}
    good |= {"tokens": 90, "other_tokens": 0, "other_bytes": 0}
    assert of_landing(good).ok
    for wrong in ({"other_tokens": 1}, {"other_bytes": 1}, {"failure": "RuntimeError: lost"}, {"transfers": 0}):
        assert not of_landing(good | wrong).ok


def test_graphs_and_families_are_judged() -> None:
    row = {"bucket": 8, "padded_rows": 5, "padded_error": 1e-3, "full_error": 0.0}
    assert of_bucket(row, torch.bfloat16).ok and not of_bucket(row, torch.float32).ok
    assert "bit for bit when full" in str(of_bucket(row, torch.bfloat16))
    agreed = {"family": "llama-8b", "kernels": 7, "seconds": 0.8, "problems": []}
    assert of_family(agreed).ok and not of_family(agreed | {"problems": ["decode attention: off"]}).ok
    assert {family.block for family in FAMILIES} == set(BLOCK_SIZES)


def test_a_sequence_with_other_bits_is_a_failure() -> None:
    row = {"step": "bucket of 8", "rows": 8, "different": 0}
    assert of_invariance(row).ok
    assert str(of_invariance(row | {"different": 1})).startswith("FAIL  invariance: bucket of 8: 1 of 8 sequences")


def test_operators_are_counted_where_there_are_no_kernels() -> None:
    """By the same code: of nested ones the outermost."""
    ones = torch.ones(4, 4)

    def run() -> None:
        for _ in range(3):
            torch.add(ones, ones)
        torch.matmul(ones, ones)  # runs mm

    counts = count(run, torch.device("cpu"))
    assert counts.kernels == {"aten::add": 3, "aten::matmul": 1} and not counts.calls


def test_kernels_of_the_device_and_calls_of_the_host_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a chip's profile has them: two recorded steps of three kernels each."""

    def event(name: str, kind: DeviceType) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=kind, cpu_parent=None)

    step = [event("cudaGraphLaunch", DeviceType.CPU), event("aten::copy_", DeviceType.CPU)]
    step += [event("cudaMemcpyAsync", DeviceType.CPU), event("cudaStreamSynchronize", DeviceType.CPU)]
    step += [event(name, DeviceType.CUDA) for name in ("attend", "multiply", "Memcpy DtoH")]

    class Profiled:
        def __init__(self, activities: Sequence[ProfilerActivity]) -> None:
            assert set(activities) == {ProfilerActivity.CPU, ProfilerActivity.CUDA}

        def __enter__(self) -> Profiled:
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[SimpleNamespace]:
            return step * 2

    monkeypatch.setattr(launches, "profile", Profiled)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    counts = count(lambda: None, torch.device("cuda"))
    assert counts.kernels == {"attend": 2, "multiply": 2, "Memcpy DtoH": 2}
    assert counts.calls == {"cudaGraphLaunch": 2, "cudaMemcpyAsync": 2}


def test_every_step_of_a_kind_runs_the_same() -> None:
    """So the count of several is that of one, times their number."""
    for counts in of_model(DRY, torch.device("cpu")).values():
        assert counts.kernels and not any(number % SHORT.counted for number in counts.kernels.values())


def test_a_recorded_step_is_launched_by_few_calls() -> None:
    row = {"device": "cuda", "how": "recorded", "batch": 8, "layers": 2, "kernels": 31.0, "kernels_of_a_layer": 11.0}
    row |= {"calls": 3.0}
    assert str(of_launches(row)) == (
        "PASS  launches: recorded, 8 rows: 31 kernels, 11 of them in each of 2 layers, launched by 3 calls"
        " (at most 3 calls)"
    )
    for wrong in ({"calls": 3.25}, {"calls": 0.0}, {"kernels": 0.0}):
        assert not of_launches(row | wrong).ok
    eager = row | {"how": "kernel by kernel", "calls": 40.0}
    assert of_launches(eager).ok and not of_launches(eager | {"kernels": 0.0}).ok
    assert str(of_launches(row | {"device": "cpu"})).endswith("2 layers (a CPU launches nothing)")


def test_boxes_must_have_the_bits_of_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"case": "1,024 tokens", "refused": "", "numbers": 4096, "different": 0, "pointers_us": 9.0, "boxes_us": 8.0}
    assert str(of_boxes(row)).startswith(
        "PASS  boxes: 1,024 tokens: 0 of 4,096 numbers differ; 8.0 us by boxes, 9.0 us"
    )
    assert not of_boxes(row | {"different": 1}).ok
    checked = {"case": "awkward lengths", "refused": "", "problem": ""}
    assert of_boxes(checked).ok and not of_boxes(checked | {"problem": "off"}).ok
    cpu = torch.device("cpu")
    assert refused_by(LLAMA_8B, cpu) == ""
    monkeypatch.setattr(boxes, "chip_of", lambda device: chips.Chip("nvidia", (8, 0), 163 * chips.KIB))
    (skipped,) = [str(of_boxes(row)) for row in box_rows(LLAMA_8B, Timer(cpu, 1), short=True)]
    assert skipped.startswith("SKIP  boxes: awkward lengths: no TMA, which NVIDIA's chips have")


def test_two_ranks_must_agree_and_recording_must_pay() -> None:
    row = {"device": "cuda", "tokens": 200, "other_tokens": 0, "plain_ms": 3.0, "recorded_ms": 1.0}
    assert of_ranks(row).ok
    for wrong in ({"other_tokens": 1}, {"recorded_ms": 3.5}):
        assert not of_ranks(row | wrong).ok
    assert of_ranks(row | {"device": "cpu", "recorded_ms": 3.5}).ok
    skipped = "SKIP  ranks: recorded steps of two ranks: 1 GPU here (needs 2 GPUs)"
    assert str(too_few(1)) == skipped


def test_make_runs_it_with_the_folder_and_the_arguments(repository: Path) -> None:
    command = ["make", "-n", "gpu", "OUT=here", "ARGS=--dry-run", "PYTHON=/usr/bin/python3", "VENV=none"]
    printed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout
    assert 'benchmarks/gpu_machine.sh "here"' in printed and '"node:570:--dry-run"' in printed
