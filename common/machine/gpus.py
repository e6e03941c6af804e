"""Detection of this machine's GPUs for `--device auto`, with the reason if there are none.

Does not import torch. A process that must not import it asks a subprocess (`find_gpus`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from common.config import AUTO, WorkerConfig
from common.errors import ConfigError

W = TypeVar("W", bound=WorkerConfig)
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
NVIDIA, AMD = Path("/proc/driver/nvidia/gpus"), Path("/sys/class/kfd/kfd/topology/nodes")
NODES = tuple(map(Path, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))
"""Device nodes of the drivers: NVIDIA's (some sandboxes hide its folder), AMD's, and WSL's."""
PROBE_S = 120.0
"""Timeout of the subprocess that imports torch, in seconds. Sufficient for a cold disk."""


class AvailableGPUs(NamedTuple):
    """The number of GPUs that torch and the kernels can use. If 0, `why` is the reason, as the end of a sentence."""

    num_gpus: int
    refusal: str = ""


def count_gpus(environ: Mapping[str, str], nvidia: Path = NVIDIA, amd: Path = AMD) -> int:
    """Count the GPUs visible to processes with this environment. 0 if the driver shows none; torch may find some."""
    for name in VISIBLE:
        if name in environ:
            listed = [one.strip() for one in environ[name].split(",")]
            return listed.index("-1") if "-1" in listed else len([one for one in listed if one])
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    nodes = (node / "gpu_id" for node in amd.iterdir()) if amd.is_dir() else ()
    return sum(file.read_text().strip() != "0" for file in nodes if file.exists())  # 0: the node is a CPU


def without_driver(environ: Mapping[str, str], nodes: tuple[Path, ...] = NODES) -> str:
    """Return why this machine cannot have a GPU, or "" if it may have one. Does not need torch."""
    if count_gpus(environ):
        return ""
    if hiding := [name for name in VISIBLE if name in environ]:
        return f"{hiding[0]} hides every GPU"
    return "" if any(node.exists() for node in nodes) else "no GPU driver was found"


def find_gpus(environ: Mapping[str, str]) -> AvailableGPUs:
    """Find the GPUs that processes with this environment can use. If a driver exists, a subprocess asks torch."""
    if refusal := without_driver(environ):
        return AvailableGPUs(0, refusal)
    command = [sys.executable, "-P", "-m", "common.machine.gpus"]
    search = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, env=dict(environ) | search, capture_output=True, text=True, timeout=PROBE_S, check=False
        )
        return AvailableGPUs(*json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return AvailableGPUs(0, f"torch did not answer within {PROBE_S:g} s")
    except (ValueError, IndexError):
        words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return AvailableGPUs(0, f"the process that imports torch failed ({words[0]})")


def find_gpus_here() -> AvailableGPUs:
    """Find the GPUs that this process can use. Imports torch if a driver exists."""
    if refusal := without_driver(os.environ):
        return AvailableGPUs(0, refusal)
    from kernels import usable_gpus

    return AvailableGPUs(*usable_gpus())


def gpu_refusal(config: WorkerConfig, gpus: AvailableGPUs) -> str:
    """Return why a worker with these settings cannot use `gpus`, or ""."""
    if gpus.refusal:
        return gpus.refusal
    if gpus.num_gpus < (needed := config.ranks_per_host):
        return f"its ranks need {needed} GPUs, but this machine has {gpus.num_gpus}"
    try:
        dataclasses.replace(config, device="cuda")
    except ConfigError as error:  # a setting that only CPUs support
        return str(error)
    return ""


def with_device(config: W, refusal: str) -> W:
    """Replace `auto` in `config` by a GPU, or by the CPU if there is a reason `refusal` against a GPU.

    Raises ConfigError, with the reason, for settings that the CPU does not support.
    """
    if config.device != AUTO:
        return config
    try:
        return dataclasses.replace(config, device="cpu" if refusal else "cuda")
    except ConfigError as error:
        raise ConfigError(error.field, error.value, f"{error.allowed}; {placement_message(refusal)}") from error


def placement_message(refusal: str) -> str:
    """Return the log message."""
    return f"--device auto: the CPU, because {refusal}" if refusal else "--device auto: a GPU"


if __name__ == "__main__":
    print(json.dumps(find_gpus_here()))
