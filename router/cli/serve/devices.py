"""Assignment of GPUs to the workers of `diptych serve`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from common.config import WorkerConfig
from common.errors import ConfigError


def on_gpus(workers: Sequence[WorkerConfig], num_gpus: int, *, may_share: bool = False) -> list[WorkerConfig]:
    """Assign GPUs to the workers whose `--device cuda` names none.

    Each worker gets its own GPUs. Workers share the GPU of a machine that has one, and with `may_share` also several
    GPUs if there are too few. Workers on the same GPU divide its memory. Raises ConfigError if there are several GPUs,
    but fewer than the workers need.
    """
    choosing = [i for i, worker in enumerate(workers) if worker.device == "cuda"]
    if num_gpus <= 1 and all(workers[i].ranks_per_host == 1 for i in choosing):
        return _sharing(workers)
    named = {index for worker in workers if worker.device.startswith("cuda:") for index in gpus_of(worker)}
    users, given = (
        Counter(index for worker in workers if worker.device != "cuda" for index in gpus_of(worker)),
        [*workers],
    )
    for i in sorted(choosing, key=lambda i: -workers[i].ranks_per_host):  # first those that need neighbours
        size = workers[i].ranks_per_host
        places = [range(first, first + size) for first in range(num_gpus - size + 1)]
        place = min(
            places, key=lambda place: (max(users[i] for i in place), sum(users[i] for i in place)), default=range(0)
        )
        if not place or (max(users[index] for index in place) and not may_share):
            raise ConfigError("device", "cuda", _too_few([workers[i] for i in choosing], num_gpus, len(named)))
        users.update(place)
        given[i] = dataclasses.replace(workers[i], device=f"cuda:{place[0]}")
    return _sharing(given)


def gpus_of(worker: WorkerConfig) -> range:
    """The GPUs of a worker: neighbours from the one that `device` names; the first without a number."""
    if not worker.on_gpu:
        return range(0)
    first = worker.device_index
    return range(first, first + worker.ranks_per_host)


def _sharing(workers: Sequence[WorkerConfig]) -> list[WorkerConfig]:
    """Divide the memory of each GPU among its workers."""
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
