"""The least memory that a worker needs and its largest steps, as values that ranks exchange. Loads without torch.

A model that will not fit is refused before any of its weights are read, with the numbers.
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
"""What a small model takes beside weights and KV: for its steps, and for copies of a matrix while it is packed."""


class MemoryNeed(msgspec.Struct, frozen=True):
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

    def plus(self, others: Sequence[MemoryNeed]) -> MemoryNeed:
        """The sum of this need and of those of other ranks on the same host."""
        every = (self, *others)
        return msgspec.structs.replace(
            self,
            weights=sum(one.weights for one in every),
            kv=sum(one.kv for one in every),
            rest=sum(one.rest for one in every),
        )

    def check(self, device: str, others: Sequence[MemoryNeed] = ()) -> None:
        """Raises ModelError where this is more than its GPU has left, or with `others` of its host more than that has.

        Says in the log what fits.
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


class LargestSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of `num_tokens` tokens and `num_rows` sampled rows; with `samples` the model makes logits. With `recorded`
    they are graphs, too. `share` is what a worker may use of its GPU's memory."""

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
    """The most tokens that a worker computes in one step."""
    if isinstance(config, DecodeWorkerConfig):
        return config.places + config.step_tokens
    return config.step_tokens
