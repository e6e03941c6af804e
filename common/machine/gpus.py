"""Which GPUs this machine has for `--device auto`, and why there may be none.

Loads without torch: a process that must not import it asks another one (`find_gpus`).
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

from common.config import WorkerConfig
from common.config.worker import AUTO
from common.errors import ConfigError

W = TypeVar("W", bound=WorkerConfig)
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
NVIDIA, AMD = Path("/proc/driver/nvidia/gpus"), Path("/sys/class/kfd/kfd/topology/nodes")
NODES = tuple(map(Path, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))
"""Device nodes of the drivers: NVIDIA's (some sandboxes hide its folder), AMD's, and that of Windows' Linux."""
PROBE_S = 120.0
"""For a process that imports torch, from a cold disk too."""


class FoundGPUs(NamedTuple):
    """How many GPUs torch and the kernels can use, and why none, as the end of a sentence; "" if there are some."""

    num_gpus: int
    refusal: str = ""


def count_gpus(environ: Mapping[str, str], nvidia: Path = NVIDIA, amd: Path = AMD) -> int:
    """Number of GPUs visible to processes with this environment; 0 if the driver shows none: torch may find some."""
    for name in VISIBLE:
        if name in environ:
            listed = [one.strip() for one in environ[name].split(",")]
            return listed.index("-1") if "-1" in listed else len([one for one in listed if one])
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    nodes = (node / "gpu_id" for node in amd.iterdir()) if amd.is_dir() else ()
    return sum(file.read_text().strip() != "0" for file in nodes if file.exists())  # 0: the node is a CPU


def without_driver(environ: Mapping[str, str], nodes: tuple[Path, ...] = NODES) -> str:
    """Why no GPU can be found, as far as that shows without torch: "" if there may be one."""
    if count_gpus(environ):
        return ""
    if hiding := [name for name in VISIBLE if name in environ]:
        return f"{hiding[0]} hides every GPU"
    return "" if any(node.exists() for node in nodes) else "no driver of a GPU was found"


def find_gpus(environ: Mapping[str, str]) -> FoundGPUs:
    """The GPUs that processes with this environment can use. Where there is a driver, it asks a process with torch."""
    if refusal := without_driver(environ):
        return FoundGPUs(0, refusal)
    command = [sys.executable, "-P", "-m", "common.machine.gpus"]
    search = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, env=dict(environ) | search, capture_output=True, text=True, timeout=PROBE_S, check=False
        )
        return FoundGPUs(*json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return FoundGPUs(0, f"torch did not answer within {PROBE_S:g} s")
    except (ValueError, IndexError):
        words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return FoundGPUs(0, f"torch could not be asked ({words[0]})")


def find_gpus_here() -> FoundGPUs:
    """The GPUs that this process can use. Imports torch where there is a driver."""
    if refusal := without_driver(os.environ):
        return FoundGPUs(0, refusal)
    from kernels.device import usable_gpus

    return FoundGPUs(*usable_gpus())


def gpu_refusal(config: WorkerConfig, gpus: FoundGPUs) -> str:
    """Why a worker with these settings runs on none of `gpus`, or ""."""
    if gpus.refusal:
        return gpus.refusal
    if gpus.num_gpus < (needed := config.ranks_per_host):
        return f"its ranks need {needed} GPUs, and this machine has {gpus.num_gpus}"
    try:
        dataclasses.replace(config, device="cuda")
    except ConfigError as error:  # a setting for CPUs alone
        return str(error)
    return ""


def with_device(config: W, refusal: str) -> W:
    """`config` with `auto` replaced by the CPU, for the reason `refusal`, or by a GPU if that is "".

    Raises ConfigError, with the reason, for settings that the CPU does not take.
    """
    if config.device != AUTO:
        return config
    try:
        return dataclasses.replace(config, device="cpu" if refusal else "cuda")
    except ConfigError as error:
        raise ConfigError(error.field, error.value, f"{error.allowed}; {placement_message(refusal)}") from error


def placement_message(refusal: str) -> str:
    """The sentence for the log."""
    return f"--device auto: the CPU, because {refusal}" if refusal else "--device auto: a GPU"


if __name__ == "__main__":
    print(json.dumps(find_gpus_here()))
