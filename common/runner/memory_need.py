"""Refuses a model that will not fit, before any of its weights are read, with the numbers. Loads without torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

from common.errors import ModelError
from common.machine.memory import Available, host_memory

log = logging.getLogger("model")
GIB: Final = 2**30
REST_BYTES: Final = GIB // 4
"""For steps, and for the copies of a matrix while it is packed: what a small model takes beside weights and KV."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a process will take at least to serve a model, or one rank of it.

    `remedies`: what would take less, in words. `share`: of a GPU's memory that the process may use.
    """

    model_id: str
    weights: int
    kv: int
    remedies: str
    share: float = 1.0
    rest: int = REST_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.rest

    def times(self, count: int) -> MemoryNeed:
        """That of so many processes which are alike."""
        return replace(self, weights=self.weights * count, kv=self.kv * count, rest=self.rest * count)

    def check(self, device: str, num_ranks: int = 1) -> None:
        """Raises ModelError where `num_ranks` of them take more than this host has left, or one more than its GPU."""
        on_host = device == "cpu"
        need, available = (self.times(num_ranks), host_memory()) if on_host else (self, gpu_memory(device, self.share))
        if available is None:
            return
        ranks = f" in {num_ranks} ranks" if on_host and num_ranks > 1 else ""
        what = (
            f"weights take {_gib(need.weights)}{ranks}, KV {_gib(need.kv)}, steps and the rest {_gib(need.rest)}, "
            f"together {_gib(need.total)} at least"
        )
        where = f"{_gib(available.num_bytes)} are available on {device} ({available.limit})"
        if need.total > available.num_bytes:
            raise ModelError(
                f"{self.model_id} does not fit, and none of its weights was read: {what}; {where}. "
                f"Give it more memory, or {self.remedies}"
            )
        log.info("%s fits: %s; %s", self.model_id, what, where)


def gpu_memory(device: str, share: float) -> Available:
    """What is free of a GPU, or this worker's `share` of all of it where that is less."""
    import torch  # which a rank has not imported when it gets its plan

    free, total = torch.cuda.mem_get_info(torch.device(device))
    if share * total < free:
        return Available(int(share * total), f"--gpu-memory-utilization {share:g} of its {_gib(total)}")
    return Available(free, f"free of its {_gib(total)}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
