"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.field import GOAL_MS, PORT, setting
from common.config.worker import WorkerConfig
from common.errors import ConfigError

USUAL_SEQS, MOST_SEQS, USUAL_CHUNK, MOST_CHUNK = 64, 256, 128, 1024
"""Defaults, and the upper limits with a goal. Memory per step and the number of CUDA graphs grow with these values."""
SEQ_TOKENS = 512
"""Minimum KV tokens per concurrent request on a GPU, which avoids preemption of long answers."""


@dataclass(frozen=True)
class DecodeWorkerConfig(WorkerConfig):
    """Settings of a decode worker, which receives KV and generates tokens."""

    section: ClassVar[str] = "decode_worker"
    env_prefix: ClassVar[str] = "DECODE"
    about: ClassVar[str] = (
        "Run one decode worker, which receives the KV of prompts, computes short prompts itself and generates tokens."
    )
    examples: ClassVar[tuple[tuple[str, str], ...]] = (
        ("diptych decode-worker --model smollm2-135m --port 7002", "for a router on this machine"),
        ("diptych decode-worker --host 0.0.0.0 --port 7002 --curve-key key.toml", "for routers on other machines"),
        ("diptych decode-worker --model Qwen/Qwen3-8B --device cuda:1 --port 7002", ""),
    )

    slo_tpot_ms: float = setting(
        0.0,
        "goal for the time per output token after the first, in milliseconds",
        group="Goals",
        details="The scheduler limits the batch size and the prompt and draft tokens per step to meet it. It also "
        "determines diptych_decode_pressure.",
        default_note="no goal",
        common=True,
        **GOAL_MS,
    )
    cuda_graphs: bool = setting(
        True,
        "capture decode steps as CUDA graphs at start",
        off="do not capture decode steps as CUDA graphs",
        group="Device",
    )
    kv_port: int = setting(0, "port that KV blocks arrive on; 0 picks a free port", group="Sockets", **PORT)
    max_num_seqs: int = setting(
        0,
        "maximum concurrent requests per worker",
        group="Scheduling",
        details=f"With --slo-tpot-ms the default is {MOST_SEQS}, and the scheduler admits fewer if the goal requires "
        f"it. On a GPU the default is {MOST_SEQS}, but at most one request per {SEQ_TOKENS} tokens of the KV cache.",
        default_note=f"{USUAL_SEQS} on a CPU, up to {MOST_SEQS} on a GPU",
        common=True,
        ge=0,
        le=4096,
    )
    local_prefill_chunk: int = setting(
        0,
        "maximum prompt tokens per step on a decode worker",
        group="Scheduling",
        details="With --slo-tpot-ms the scheduler may compute fewer.",
        default_note=f"{USUAL_CHUNK}, or up to {MOST_CHUNK} with --slo-tpot-ms",
        ge=0,
        le=1_000_000,
    )
    max_draft_tokens: int = setting(
        6,
        "maximum draft tokens per sequence and step; 0 disables speculative decoding",
        group="Speculative decoding",
        details="Without a draft model or head, drafts are the tokens that followed the same tokens earlier in "
        "the sequence. The model verifies all drafts, so answers stay the same.",
        ge=0,
        le=64,
    )
    draft_model: str = setting(
        "",
        "smaller model with the same vocabulary that drafts tokens, named as in --model",
        group="Speculative decoding",
        details="Tokens are drafted only where that saves time. Its KV is part of --kv-memory-gib.",
        default_note="none",
        metavar="NAME",
    )
    draft_quantization: str = setting(
        "auto",
        "format of the draft model's weights in memory",
        group="Speculative decoding",
        details="`none` keeps --dtype. `auto` keeps the format of a quantized checkpoint, otherwise int8 on a CPU "
        "and none on a GPU.",
        choices=("auto", "none", "int8", "int4"),
        metavar="FORMAT",
    )
    watermark: float = setting(
        0.02,
        "fraction of KV blocks reserved for running requests",
        group="KV cache",
        ge=0,
        le=0.5,
    )
    grant_timeout_s: float = setting(
        30.0,
        "maximum seconds that a prompt waits for free KV blocks on the decode worker",
        group="Timeouts",
        ge=0.05,
        le=3600,
    )
    transfer_timeout_s: float = setting(
        30.0,
        "seconds without a KV block after which a transfer fails",
        group="Timeouts",
        ge=0.05,
        le=3600,
    )

    def check(self) -> None:
        super().check()
        if self.draft_model and not self.max_draft_tokens:
            raise ConfigError("draft_model", self.draft_model, "empty with --max-draft-tokens 0")
        if self.batch_invariant and self.on_gpu and self.max_draft_tokens:
            allowed = f"0 on {self.device} with --batch-invariant"
            raise ConfigError("max_draft_tokens", self.max_draft_tokens, allowed)
        if self.draft_model and self.draft_head:
            raise ConfigError("draft_model", self.draft_model, f"empty with --draft-head {self.draft_head}")
        if self.on_gpu and self.draft_quantization in ("int8", "int4"):
            raise ConfigError("draft_quantization", self.draft_quantization, f"auto or none on {self.device}")

    @property
    def places(self) -> int:
        return self.max_num_seqs or (MOST_SEQS if self.slo_tpot_ms or self.on_gpu else USUAL_SEQS)

    def places_within(self, kv_tokens: int) -> int:
        """Return `places`. On a GPU the default is limited to one per `SEQ_TOKENS` of `kv_tokens`."""
        if self.max_num_seqs or not self.on_gpu:
            return self.places
        return max(1, min(self.places, kv_tokens // SEQ_TOKENS))

    @property
    def usual_places(self) -> int:
        """Maximum number of concurrent requests before step times are known."""
        return USUAL_SEQS if self.slo_tpot_ms and not self.max_num_seqs else self.places

    @property
    def step_tokens(self) -> int:
        return self.local_prefill_chunk or (MOST_CHUNK if self.slo_tpot_ms else USUAL_CHUNK)

    @property
    def usual_step_tokens(self) -> int:
        """Maximum number of prompt tokens per step before step times are known."""
        return self.local_prefill_chunk or USUAL_CHUNK

    @property
    def shares_kv(self) -> bool:
        return self.maps_memory and not self.on_gpu
