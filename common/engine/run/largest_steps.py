"""The largest steps of a worker, by which its ranks measure what is left for KV blocks. Loads without torch."""

from __future__ import annotations

import msgspec

from common.config import DecodeWorkerConfig, WorkerConfig


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
