"""What `--device auto` finds, and the sentence for why it is the CPU. No GPU is needed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.worker import command
from common.errors import ConfigError
from common.machine import gpus
from common.machine.gpus import (
    AvailableGPUs,
    count_gpus,
    find_gpus,
    find_gpus_here,
    gpu_refusal,
    placement_message,
    with_device,
    without_driver,
)

NOTHING = Path("/nonexistent")
BUILT_FOR_CPUS = AvailableGPUs(
    0, f"torch {torch.__version__} is a CPU build; install PyTorch's build for this GPU to use it"
)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,2, 5"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1),  # the driver stops at the first that is none
        ({"HIP_VISIBLE_DEVICES": "3"}, 1),
        ({}, 0),
    ],
)
def test_the_environment_says_what_is_visible(environ: dict[str, str], count: int) -> None:
    assert count_gpus(environ, NOTHING, NOTHING) == count


def test_the_driver_says_what_is_there(tmp_path: Path) -> None:
    nvidia, amd = tmp_path / "gpus", tmp_path / "nodes"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (nvidia / name).mkdir(parents=True)
    for number, gpu_id in enumerate(("0", "51234", "8123", "991")):
        (amd / str(number)).mkdir(parents=True)
        (amd / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    assert count_gpus({}, nvidia, NOTHING) == 2
    assert count_gpus({}, NOTHING, amd) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_torch_is_not_asked(tmp_path: Path) -> None:
    assert without_driver({}, (NOTHING,)) == "no GPU driver was found"
    assert without_driver({"CUDA_VISIBLE_DEVICES": ""}, (tmp_path,)) == "CUDA_VISIBLE_DEVICES hides every GPU"
    assert without_driver({}, (NOTHING, tmp_path)) == ""  # a device node alone, as in a sandbox
    assert without_driver({"CUDA_VISIBLE_DEVICES": "0"}, (NOTHING,)) == ""


@pytest.mark.skipif(torch.version.cuda is not None, reason="of a build for CPUs")
def test_a_build_of_torch_for_cpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert find_gpus_here() == BUILT_FOR_CPUS


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="of a build for CPUs")
def test_a_process_asks_another_one() -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == BUILT_FOR_CPUS


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('ModuleNotFoundError: No module', file=sys.stderr); sys.exit(1)", "ModuleNotFoundError: No module"),
        ("print('not JSON')", "exit status 0"),
    ],
)
def test_a_process_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch, program: str, reason: str) -> None:
    run = gpus.subprocess.run
    monkeypatch.setattr(
        gpus.subprocess, "run", lambda command, **rest: run([command[0], "-c", f"import sys; {program}"], **rest)
    )
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == (0, f"the process that imports torch failed ({reason})")


def test_a_worker_is_placed() -> None:
    auto = DecodeWorkerConfig(tensor_parallel_size=2, kv_memory_gib=1.0)
    assert gpu_refusal(auto, AvailableGPUs(2)) == "" and with_device(auto, "").device == "cuda"
    few = gpu_refusal(auto, AvailableGPUs(1))
    assert few == "its ranks need 2 GPUs, but this machine has 1"
    assert with_device(auto, few).device == "cpu" and placement_message(few).endswith(f"the CPU, because {few}")
    for given in ("cpu", "cuda:1"):
        named = DecodeWorkerConfig(device=given)
        assert with_device(named, "whatever") is named
    with pytest.raises(
        ConfigError,
        match="on a CPU or with --tensor-parallel-size.*; --device auto: the CPU, because no driver",
    ):
        with_device(PrefillWorkerConfig(kv_transport="cuda-ipc"), "no driver")


def test_both_roles_of_a_worker_are_on_one_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command, "find_gpus_here", lambda: AvailableGPUs(1))
    with caplog.at_level(logging.INFO):
        both = command._on_found_device(DecodeWorkerConfig(), PrefillWorkerConfig(), "diptych decode-worker")
        cpus = command._on_found_device(DecodeWorkerConfig(), PrefillWorkerConfig(quantization="int8"), "diptych")
    assert [one.device for one in (*both, *cpus) if one is not None] == ["cuda", "cuda", "cpu", "cpu"]
    assert "--device auto: a GPU" in caplog.messages
    assert "the CPU, because invalid quantization='int8': must be auto or none on cuda" in caplog.text


def test_a_refused_start_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "find_gpus_here", lambda: AvailableGPUs(0, "no GPU driver was found"))
    with pytest.raises(SystemExit) as ended:
        command._on_found_device(DecodeWorkerConfig(kv_host_gib=1.0), None, "diptych decode-worker")
    assert ended.value.code == 2 and "because no GPU driver was found" in capsys.readouterr().err
