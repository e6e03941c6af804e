"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.field import setting
from common.config.worker import WorkerConfig
from common.errors import ConfigError

CPU_STEP, GPU_STEP = 512, 8192
"""Tokens: matrix products of a GPU need thousands of rows to be bound by arithmetic."""


@dataclass(frozen=True)
class PrefillWorkerConfig(WorkerConfig):
    """A prefill worker: computes the KV cache of prompts and ships it."""

    section: ClassVar[str] = "prefill_worker"
    env_prefix: ClassVar[str] = "PREFILL"
    about: ClassVar[str] = (
        "Computes the KV cache of prompts in chunks, ships it to decode workers and samples the first token."
    )

    max_num_batched_tokens: int = setting(
        0,
        "prompt tokens computed in one step, over all requests, at most: while prompts have a goal for their first "
        f"token, as few as lose hardly any tokens a second; 0: {CPU_STEP}, on a GPU {GPU_STEP}",
        group="Scheduling",
        ge=0,
        le=1_000_000,
    )
    max_num_seqs: int = setting(32, "requests computed side by side", group="Scheduling", ge=1, le=4096)
    kv_streams: int = setting(
        1, "parallel connections to each decode worker for KV blocks", group="Transfer", ge=1, le=16
    )
    kv_lease_s: float = setting(
        30.0, "seconds that KV is kept for a silent decode worker", group="Transfer", ge=0.05, le=3600
    )
    kv_wire_dtype: str = setting(
        "native",
        "number type of KV blocks in frames: native is the cache's own; fp8 is half of bfloat16, a quarter of float32, "
        "and an approximation. Shared memory always takes native",
        group="Transfer",
        choices=("native", "fp8"),
    )

    def check(self) -> None:
        super().check()
        if self.kv_wire_dtype != "native" and self.kv_transport not in ("auto", "tcp"):
            allowed = f"native with kv_transport {self.kv_transport}, which sends no frames"
            raise ConfigError("kv_wire_dtype", self.kv_wire_dtype, allowed)
        if self.kv_wire_dtype != "native" and self.kv_cache_dtype in ("fp8", "int8"):
            allowed = f"native with kv_cache_dtype {self.kv_cache_dtype}, which is as small already"
            raise ConfigError("kv_wire_dtype", self.kv_wire_dtype, allowed)

    @property
    def places(self) -> int:
        return self.max_num_seqs

    @property
    def step_tokens(self) -> int:
        return self.max_num_batched_tokens or (GPU_STEP if self.on_gpu else CPU_STEP)

    @property
    def shares_kv(self) -> bool:
        return self.maps_memory
