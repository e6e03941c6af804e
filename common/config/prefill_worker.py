"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.field import setting
from common.config.worker import WorkerConfig
from common.errors import ConfigError

CPU_STEP, GPU_STEP = 512, 8192
"""Tokens. Matrix products on a GPU need thousands of rows to be compute-bound."""


@dataclass(frozen=True)
class PrefillWorkerConfig(WorkerConfig):
    """Settings of a prefill worker, which computes the KV of prompts and sends it to decode workers."""

    section: ClassVar[str] = "prefill_worker"
    env_prefix: ClassVar[str] = "PREFILL"
    about: ClassVar[str] = (
        "Run one prefill worker, which computes prompts in chunks, samples the first token and sends the KV to a "
        "decode worker."
    )
    examples: ClassVar[tuple[tuple[str, str], ...]] = (
        ("diptych prefill-worker --model smollm2-135m --port 7001", "for a router on this machine"),
        ("diptych prefill-worker --host 0.0.0.0 --port 7001 --curve-key key.toml", "for routers on other machines"),
        ("diptych prefill-worker --model Qwen/Qwen3-8B --device cuda:0 --port 7001", ""),
    )

    max_num_batched_tokens: int = setting(
        0,
        "maximum prompt tokens per step, over all requests",
        group="Scheduling",
        details="With a TTFT goal, the scheduler uses the smallest number that costs little throughput.",
        default_note=f"{CPU_STEP} on a CPU, {GPU_STEP} on a GPU",
        ge=0,
        le=1_000_000,
    )
    max_num_seqs: int = setting(
        32,
        "maximum concurrent requests per worker",
        group="Scheduling",
        common=True,
        ge=1,
        le=4096,
    )
    kv_streams: int = setting(
        1,
        "parallel connections to each decode worker for KV blocks",
        group="KV transfer",
        ge=1,
        le=16,
    )
    kv_lease_s: float = setting(
        30.0,
        "seconds that KV is kept for a decode worker that does not respond",
        group="Timeouts",
        ge=0.05,
        le=3600,
    )
    kv_wire_dtype: str = setting(
        "native",
        "number type of KV blocks sent over TCP",
        group="KV transfer",
        details="`native` is that of the KV cache. `fp8` is an approximation of half the size of bfloat16. Shared "
        "memory always uses native.",
        choices=("native", "fp8"),
    )

    def check(self) -> None:
        super().check()
        if self.kv_wire_dtype != "native" and self.kv_transport not in ("auto", "tcp"):
            allowed = f"native with --kv-transport {self.kv_transport}"
            raise ConfigError("kv_wire_dtype", self.kv_wire_dtype, allowed)
        if self.kv_wire_dtype != "native" and self.kv_cache_dtype in ("fp8", "int8"):
            allowed = f"native with --kv-cache-dtype {self.kv_cache_dtype}"
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
