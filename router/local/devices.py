"""Which GPUs the workers of `diptych serve` get. No torch: devices are counted by what the driver shows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.config import WorkerConfig
from common.errors import ConfigError

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
NVIDIA, AMD = Path("/proc/driver/nvidia/gpus"), Path("/sys/class/kfd/kfd/topology/nodes")


def count_gpus(environ: Mapping[str, str], nvidia: Path = NVIDIA, amd: Path = AMD) -> int:
    """How many GPUs processes with this environment see; 0 where the driver shows none, which torch may still find."""
    for name in VISIBLE:
        if name in environ:
            listed = [one.strip() for one in environ[name].split(",")]
            return listed.index("-1") if "-1" in listed else len([one for one in listed if one])
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    nodes = (node / "gpu_id" for node in amd.iterdir()) if amd.is_dir() else ()
    return sum(file.read_text().strip() != "0" for file in nodes if file.exists())  # 0: the node is a CPU


def on_gpus(workers: Sequence[WorkerConfig], num_gpus: int) -> list[WorkerConfig]:
    """The same workers, each on GPUs of its own, as far as `--device cuda` leaves the choice.

    One GPU is shared by all workers that it can take, and so is a GPU that several name: each may use a part of its
    memory. ConfigError where there are several GPUs, and fewer than the workers need.
    """
    choosing = [i for i, worker in enumerate(workers) if worker.device == "cuda"]
    if num_gpus <= 1 and all(workers[i].ranks_per_host == 1 for i in choosing):
        return _sharing(workers)
    named = {index for worker in workers if worker.device.startswith("cuda:") for index in gpus_of(worker)}
    free, given = set(range(num_gpus)) - named, list(workers)
    for i in sorted(choosing, key=lambda i: -workers[i].ranks_per_host):  # first those that need neighbours
        size = workers[i].ranks_per_host
        first = next((index for index in sorted(free) if free.issuperset(range(index, index + size))), None)
        if first is None:
            raise ConfigError("device", "cuda", _too_few([workers[i] for i in choosing], num_gpus, len(named)))
        free -= set(range(first, first + size))
        given[i] = dataclasses.replace(workers[i], device=f"cuda:{first}")
    return _sharing(given)


def gpus_of(worker: WorkerConfig) -> range:
    """The GPUs of a worker: neighbours from the one that `device` names; the first without a number."""
    if not worker.on_gpu:
        return range(0)
    first = worker.device_index
    return range(first, first + worker.ranks_per_host)


def _sharing(workers: Sequence[WorkerConfig]) -> list[WorkerConfig]:
    """Workers of one GPU share its memory."""
    users = Counter(index for worker in workers for index in gpus_of(worker))
    found = []
    for worker in workers:
        count = max((users[index] for index in gpus_of(worker)), default=1)
        share = worker.gpu_memory_utilization / count
        found.append(worker if count == 1 else dataclasses.replace(worker, gpu_memory_utilization=share))
    return found


def _too_few(workers: Sequence[WorkerConfig], num_gpus: int, num_named: int) -> str:
    needed = sum(worker.ranks_per_host for worker in workers)
    each = sorted({worker.ranks_per_host for worker in workers})
    of_each = f" of {' or '.join(map(str, each))} GPUs each" if each != [1] else ""
    seen = f"this machine has {num_gpus}" + f", of which other workers name {num_named}" * bool(num_named)
    return (
        f"more GPUs: {len(workers)} workers{of_each} need {needed}, and {seen}; start fewer workers, or name the GPUs "
        "that they are to share, as in --prefill-device cuda:0 --decode-device cuda:0"
    )
