"""Minimum memory of a worker, and its largest steps, as values that ranks exchange. Does not load torch.

A model that cannot fit is refused before its weights are read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from common.config import DecodeWorkerConfig, WorkerConfig
from common.errors import ModelError
from common.machine import Available, host_memory

log = logging.getLogger(__name__)
GIB: Final = 2**30
REST_BYTES: Final = GIB // 4
"""Memory of a small model in addition to weights and KV: steps, and copies of a matrix during packing."""


class MemoryNeed(msgspec.Struct, frozen=True):
    """Minimum bytes of a process that serves a model or one rank of it.

    `remedies` lists, for the operator, settings that need less. `share` is the usable part of a GPU's memory.
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

    def plus(self, others: Sequence[MemoryNeed]) -> MemoryNeed:
        """Return the sum of this need and those of other ranks on the same host."""
        every = (self, *others)
        return msgspec.structs.replace(
            self,
            weights=sum(one.weights for one in every),
            kv=sum(one.kv for one in every),
            rest=sum(one.rest for one in every),
        )

    def check(self, device: str, others: Sequence[MemoryNeed] = ()) -> None:
        """Raise ModelError if the device, or the host together with `others` of its ranks, has too little memory.

        Otherwise logs the numbers.
        """
        if device == "cpu":
            need, available = self.plus(others), host_memory()
        else:
            need, available, others = self, gpu_memory(device, self.share), ()
        if available is None:
            return
        ranks = f" in {1 + len(others)} ranks" if others else ""
        what = (
            f"weights take {_gib(need.weights)}{ranks}, KV {_gib(need.kv)}, steps and the rest {_gib(need.rest)}, "
            f"in total at least {_gib(need.total)}"
        )
        where = f"{_gib(available.num_bytes)} available on {device} ({available.limit})"
        if need.total > available.num_bytes:
            raise ModelError(
                f"{self.model_id} does not fit in memory (no weights were read): {what}; {where}. "
                f"Provide more memory, or use {self.remedies}"
            )
        log.info("model %s fits in memory: %s; %s", self.model_id, what, where)


def gpu_memory(device: str, share: float) -> Available:
    """Return the free memory of a GPU, or this worker's `share` of all of it if that is less."""
    import torch  # not loaded yet when a rank receives its plan

    free, total = torch.cuda.mem_get_info(torch.device(device))
    if share * total < free:
        return Available(int(share * total), f"--gpu-memory-utilization {share:g} of {_gib(total)}")
    return Available(free, f"free of {_gib(total)}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


class LargestSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Largest steps of a worker: `num_tokens` tokens and `num_rows` sampled rows.

    With `samples`, the model computes logits. With `recorded`, steps are also graphs. `share` is the part of the GPU's
    memory that the worker may use.
    """

    num_tokens: int
    num_rows: int
    samples: bool
    recorded: bool
    share: float
    block_size: int

    @classmethod
    def of(cls, config: WorkerConfig, *, samples: bool) -> LargestSteps:
        return cls(
            num_tokens=step_tokens(config),
            num_rows=max(1, config.places),
            samples=samples,
            recorded=isinstance(config, DecodeWorkerConfig) and config.cuda_graphs,
            share=config.gpu_memory_utilization,
            block_size=config.block_tokens,
        )


def step_tokens(config: WorkerConfig) -> int:
    """Return the maximum number of tokens that a worker computes in one step."""
    if isinstance(config, DecodeWorkerConfig):
        return config.places + config.step_tokens
    return config.step_tokens
